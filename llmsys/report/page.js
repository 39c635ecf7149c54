"use strict";
// Draws the figures named in <script id="figures"> into the elements of the same id, in the colours of the page's mode.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const darkMode = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const chosen = new Map(figures.map((figure) => [figure.id, { view: 0, moment: figure.moments.length - 1 }]));
  const colourKeys = new Set(["color", "fillcolor", "colorscale"]);

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // "theme:blue" becomes the colour of that name, but only where plotly expects a colour: labels are left as they are.
  function themed(value, key) {
    if (Array.isArray(value)) return colourKeys.has(key) || typeof value[0] === "object" ? value.map((item) => themed(item, key)) : value;
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, themed(item, name)]));
    }
    if (typeof value !== "string" || !colourKeys.has(key) || !value.startsWith("theme:")) return value;
    if (value === "theme:heat-scale") return [[0, colour("even")], [1, colour("blue")]];
    if (value === "theme:even-scale") return [[0, colour("under")], [0.5, colour("even")], [1, colour("over")]];
    return colour(value.slice("theme:".length));
  }

  function axis(own) {
    const calm = { gridcolor: colour("grid"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, fixedrange: touch };
    const written = own || {};
    return { ...calm, ...written, title: { standoff: 8, font: { size: 12, color: colour("muted") }, ...(written.title || {}) } };
  }

  function layout(figure) {
    // with more ticks plotly turns their labels on a phone
    const ticks = document.getElementById(figure.id).clientWidth < 450 ? { nticks: 4 } : {};
    const { xaxis, yaxis, margin, ...rest } = themed(figure.layout);
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
      margin: { l: 20, r: 14, t: rest.showlegend ? 34 : 12, b: 20, ...margin },
      legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", traceorder: "normal", maxheight: 1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("faint"), activecolor: colour("ink") },
      hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("line"), font: { color: colour("ink") } },
      dragmode: touch ? false : "zoom", bargap: 0.3,
      ...rest, xaxis: { ...ticks, ...axis(xaxis) }, yaxis: axis(yaxis),
    };
  }

  // plotly.js 4 offers to upload a plot to its makers' cloud unless told not to; the only buttons are those named here.
  const settings = {
    responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", showTips: false,
    displayModeBar: touch ? false : "hover", modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["resetScale2d"]],
  };

  function draw(figure) {
    const { view, moment } = chosen.get(figure.id);
    const traces = themed(figure.traces);
    const plan = layout(figure);
    if (figure.views.length) {
      figure.views[view].y.forEach((y, i) => { traces[i].y = y; });
      plan.yaxis.title.text = figure.views[view].title;
    }
    if (figure.moments.length) traces[0].z = figure.moments[moment];
    return Plotly.react(figure.id, traces, plan, settings);
  }

  function connect(figure) {
    const box = document.getElementById(figure.id).closest("figure");
    const buttons = [...box.querySelectorAll("[data-view]")];
    buttons.forEach((button, i) => button.addEventListener("click", () => {
      chosen.get(figure.id).view = i;
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      draw(figure);
    }));
    const slider = box.querySelector("input[type=range]");
    if (slider) slider.addEventListener("input", () => {
      chosen.get(figure.id).moment = Number(slider.value);
      box.querySelector("output").textContent = figure.labels[slider.value];
      draw(figure);
    });
  }

  async function drawSafely(figure) {
    try {
      await draw(figure);
    } catch (error) {
      document.getElementById(figure.id).textContent = `This plot could not be drawn: ${error.message}`;
      console.error(`${figure.id}: ${error.stack || error}`);
    }
  }

  figures.forEach(connect);
  darkMode.addEventListener("change", () => figures.forEach(drawSafely));
  Promise.all(figures.map(drawSafely)).then(() => { document.documentElement.dataset.plots = "drawn"; });
})();

// What a reader of the open page would stumble over, as an array of sentences: text that is cut, covered or too pale,
// plots without marks, and a page that must be scrolled sideways.
(() => {
  const found = [];
  const name = (text) => `“${text.trim().replace(/\s+/g, " ").slice(0, 60)}”`;
  const isShown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const getColour = (text) => {
    const parts = text.match(/[\d.]+/g).map(Number);
    return text.startsWith("color(srgb") ? [...parts.slice(0, 3).map((one) => 255 * one), parts[3] ?? 1] : [...parts.slice(0, 3), parts[3] ?? 1];
  };
  const blend = ([r, g, b, a], under) => [r, g, b].map((one, i) => one * a + under[i] * (1 - a));

  // WCAG 2.2, relative luminance and contrast
  const luminance = (colour) => colour.map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (one, other) => {
    const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  function getBackground(element) {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      const colour = getColour(getComputedStyle(one).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reduceRight((under, layer) => blend(layer, under), [255, 255, 255]);
  }
  function checkContrast(element, colour, text) {
    const under = getBackground(element);
    const ratio = contrast(blend(getColour(colour), under), under);
    if (ratio < 4.5) found.push(`${name(text)} has a contrast of ${ratio.toFixed(2)}, not 4.5`);
  }

  if (document.scrollingElement.scrollWidth > innerWidth) {
    const scrolls = (element) => element && (getComputedStyle(element).overflowX !== "visible" || scrolls(element.parentElement));
    const wide = [...document.body.querySelectorAll("*")]
      .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !scrolls(one.parentElement));
    const names = wide.slice(0, 3).map((one) => `<${one.tagName.toLowerCase()} class="${one.className}">`);
    found.push(`the page is ${document.scrollingElement.scrollWidth} pixels wide, not ${innerWidth}: ${names.join(", ")}`);
  }

  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const { parentElement: element, data } = walker.currentNode;
    if (!data.trim() || element.closest("svg, script, style, noscript") || !isShown(element)) continue;
    const style = getComputedStyle(element);
    if (!element.closest(":disabled")) checkContrast(element, style.color, data);
    if (["hidden", "clip"].includes(style.overflowX) && style.textOverflow !== "ellipsis" && element.scrollWidth > element.clientWidth + 1) {
      found.push(`${name(data)} is cut: ${element.scrollWidth} pixels in ${element.clientWidth}`);
    }
  }

  for (const plot of document.querySelectorAll(".plot")) {
    const box = plot.getBoundingClientRect();
    const card = plot.parentElement.getBoundingClientRect();
    const drawn = plot.querySelector("path.js-line, path.point, .point path, image");
    if (!drawn) found.push(`${plot.id} is empty`);
    for (const svg of plot.querySelectorAll("svg.main-svg")) {
      const { width } = svg.getBoundingClientRect();
      if (width > box.width + 1) found.push(`${plot.id} is ${width} pixels wide in a box of ${box.width}`);
    }
    if (box.right > card.right + 1) found.push(`${plot.id} leaves its card`);
    const texts = [...plot.querySelectorAll("svg text")].filter((one) => one.textContent.trim() && isShown(one))
      .map((one) => ({ text: one.textContent, rect: one.getBoundingClientRect(), style: getComputedStyle(one), element: one }))
      .filter(({ rect }) => rect.width > 0 && rect.height > 0);
    // plotly clips the labels of dots at the axes
    const area = plot.querySelector(".nsewdrag")?.getBoundingClientRect();
    for (const { text, rect, element } of texts) {
      if (area && element.closest(".textpoint") && (rect.left < area.left - 1 || rect.right > area.right + 1)) {
        found.push(`${plot.id}: ${name(text)} is cut by the axes`);
      }
    }
    for (const { text, rect, style } of texts) {
      if (rect.left < box.left - 1 || rect.right > box.right + 1 || rect.top < box.top - 1 || rect.bottom > box.bottom + 1) {
        found.push(`${plot.id}: ${name(text)} leaves the plot`);
      }
      checkContrast(plot, style.fill, text);
    }
    texts.forEach((one, i) => texts.slice(i + 1).forEach((other) => {
      const width = Math.min(one.rect.right, other.rect.right) - Math.max(one.rect.left, other.rect.left);
      const height = Math.min(one.rect.bottom, other.rect.bottom) - Math.max(one.rect.top, other.rect.top);
      if (width > 2 && height > 4) found.push(`${plot.id}: ${name(one.text)} covers ${name(other.text)}`);
    }));
  }
  return [...new Set(found)];
})();

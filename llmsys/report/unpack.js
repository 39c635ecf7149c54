"use strict";
// Runs the library in <script id="library">: base 85 (RFC 1924, "," for "<") of a raw LZMA stream with lc=3, lp=0, pb=0.
// Browsers have no decoder that packs it as small. The page's policy names the hash of the result.
(() => {
  const box = document.getElementById("library");
  const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
  const values = new Map([...digits].map((digit, value) => [digit.charCodeAt(0), value]));

  function fromBase85(text) {
    const bytes = new Uint8Array(text.length / 5 * 4);
    for (let i = 0, at = 0; i < text.length; i += 5, at += 4) {
      let word = 0;
      for (let k = 0; k < 5; k++) word = word * 85 + values.get(text.charCodeAt(i + k));
      bytes[at] = word >>> 24; bytes[at + 1] = word >>> 16; bytes[at + 2] = word >>> 8; bytes[at + 3] = word;
    }
    return bytes;
  }

  // The decoder of the LZMA specification (Pavlov 2015): a probability for each bit in its context, and a range coder.
  function decode(input, size) {
    const out = new Uint8Array(size);
    const fresh = (count) => new Uint16Array(count).fill(1024);
    let at = 1, range = 0xffffffff, code = 0;
    const normalize = () => { if (range < 0x1000000) { range *= 256; code = code * 256 + input[at++]; } };
    for (let i = 0; i < 4; i++) code = code * 256 + input[at++];

    function bit(chances, i) {
      const chance = chances[i], bound = (range >>> 11) * chance;
      const one = code >= bound;
      if (one) { range -= bound; code -= bound; chances[i] = chance - (chance >>> 5); }
      else { range = bound; chances[i] = chance + ((2048 - chance) >>> 5); }
      normalize();
      return one ? 1 : 0;
    }

    function tree(chances, bits, base = 0) {
      let node = 1;
      for (let i = 0; i < bits; i++) node = node * 2 + bit(chances, base + node);
      return node - (1 << bits);
    }

    function reverseTree(chances, bits, base) {
      let node = 1, value = 0;
      for (let i = 0; i < bits; i++) { const b = bit(chances, base + node); node = node * 2 + b; value |= b << i; }
      return value;
    }

    function direct(bits) {
      let value = 0;
      for (let i = 0; i < bits; i++) {
        range = range >>> 1;
        const one = code >= range;
        if (one) code -= range;
        value = value * 2 + (one ? 1 : 0);
        normalize();
      }
      return value;
    }

    const newLengths = () => ({ choice: fresh(2), low: fresh(8), middle: fresh(8), high: fresh(256) });
    function readLength(own) {
      if (!bit(own.choice, 0)) return tree(own.low, 3);
      return bit(own.choice, 1) ? 16 + tree(own.high, 8) : 8 + tree(own.middle, 3);
    }

    const literals = fresh(0x300 << 3), matches = fresh(12), repeats = fresh(12), longs = fresh(12);
    const olds = [fresh(12), fresh(12), fresh(12)];
    const slots = [0, 1, 2, 3].map(() => fresh(64)), nears = fresh(128), aligned = fresh(16);
    const lengths = newLengths(), repeatLengths = newLengths();
    let state = 0, done = 0, [d0, d1, d2, d3] = [0, 0, 0, 0];

    function readDistance(length) {
      const slot = tree(slots[Math.min(length, 3)], 6);
      if (slot < 4) return slot;
      const bits = (slot >> 1) - 1, high = (2 + (slot & 1)) * 2 ** bits;
      if (slot < 14) return high + reverseTree(nears, bits, high - slot);
      const middle = direct(bits - 4) * 16;
      return high + middle + reverseTree(aligned, 4, 0);
    }

    function readLiteral() {
      const base = (done ? out[done - 1] >> 5 : 0) * 0x300;
      let symbol = 1, same = state >= 7, other = same ? out[done - d0 - 1] : 0;
      while (symbol < 0x100) {
        const hint = other >> 7 & 1;
        const b = bit(literals, base + (same ? (1 + hint) * 0x100 : 0) + symbol);
        symbol = symbol * 2 + b;
        other <<= 1;
        same = same && hint === b;
      }
      return symbol - 0x100;
    }

    while (done < size) {
      if (!bit(matches, state)) {
        const literal = readLiteral();  // it reads `done`
        out[done++] = literal;
        state = state < 4 ? 0 : state < 10 ? state - 3 : state - 6;
        continue;
      }
      let length;
      if (!bit(repeats, state)) {
        length = readLength(lengths);
        [d3, d2, d1, d0] = [d2, d1, d0, readDistance(length)];
        state = state < 7 ? 7 : 10;
      } else {
        if (!bit(olds[0], state)) {
          if (!bit(longs, state)) { out[done] = out[done - d0 - 1]; done++; state = state < 7 ? 9 : 11; continue; }
        } else if (!bit(olds[1], state)) [d0, d1] = [d1, d0];
        else if (!bit(olds[2], state)) [d0, d1, d2] = [d2, d0, d1];
        else [d0, d1, d2, d3] = [d3, d0, d1, d2];
        length = readLength(repeatLengths);
        state = state < 7 ? 8 : 11;
      }
      for (let i = 0; i < length + 2; i++, done++) out[done] = out[done - d0 - 1];
    }
    return out;
  }

  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(decode(fromBase85(box.textContent), Number(box.dataset.bytes)));
  document.head.append(script);
})();

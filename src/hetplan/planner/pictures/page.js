"use strict";
// The timeline: drawn for the width of the window, zoomed in time, told event by event.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const box = document.getElementById("timeline"), said = document.getElementById("said");
  const ROW = 46, LANES = [[17, 13], [31, 9]];  // heights; of each lane: top, height
  const UNITS = [["h", 36000, 3600], ["min", 600, 60], ["s", 1, 1], ["ms", 1e-3, 1e-3],
    ["us", 0, 1e-6]];
  let from = 0, to = 1, row = 0, event = -1, pressed = null;  // times: shares of the iteration

  function time(share) {
    const seconds = share * data.seconds;
    if (!seconds) return "0 s";
    const [unit, , factor] = UNITS.find(([, least]) => Math.abs(seconds) >= least);
    return `${Number((seconds / factor).toPrecision(4))} ${unit}`;
  }

  const escape = text => text.replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`);
  const events = r => data.rows[r].lanes.flatMap((lane, l) => lane.map((e, i) => [l, i, ...e]))
    .sort((a, b) => a[3] - b[3]);
  const sentence = (r, [, , kind, begin, end, batch]) => `${data.rows[r].title}: ` +
    `${data.kinds[kind]}${batch < 0 ? "" : ` of micro-batch ${batch}`}, ` +
    `${time((end - begin) / 1e6)}, from ${time(begin / 1e6)}`;

  function draw() {
    const width = Math.max(box.clientWidth, 240), height = data.rows.length * ROW + 22, parts = [];
    const x = share => (share - from) / (to - from) * width;
    const chosen = event < 0 ? null : events(row)[event];
    data.rows.forEach((r, i) => {
      const y = i * ROW;
      parts.push(`<text x="0" y="${y + 12}">${escape(r.title)} ` +
        `<tspan class="small">${escape(r.devices)}; ${escape(r.layers)}</tspan></text>`);
      LANES.forEach(([top, thick], l) => {
        parts.push(`<rect class="lane" x="0" y="${y + top}" width="${width}" height="${thick}"/>`);
        r.lanes[l].forEach(([kind, begin, end], e) => {
          const left = Math.max(x(begin / 1e6), 0), right = Math.min(x(end / 1e6), width);
          if (right < 0 || left > width) return;
          const mark = chosen && i === row && chosen[0] === l && chosen[1] === e;
          parts.push(`<rect${mark ? ' class="chosen"' : ""} x="${left.toFixed(2)}" ` +
            `y="${y + top}" width="${Math.max(right - left, 0.3).toFixed(2)}" ` +
            `height="${thick}" fill="var(--${data.kinds[kind]})" data-e="${i},${l},${e}"/>`);
        });
      });
    });
    for (let k = 0; k <= 4; k++) {
      const at = k / 4 * width, anchor = ["start", "middle", "middle", "middle", "end"][k];
      parts.push(`<line class="axis" x1="${at}" x2="${at}" y1="0" y2="${height - 16}"/>` +
        `<text class="small" x="${at}" y="${height - 4}" text-anchor="${anchor}">` +
        `${time(from + k / 4 * (to - from))}</text>`);
    }
    box.innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="img" ` +
      `aria-label="Timeline of one iteration, ${time(from)} to ${time(to)}; the table of stages ` +
      `says the same">${parts.join("")}</svg>`;
  }

  function show(begin, end) {
    const length = Math.min(Math.max(end - begin, 1e-5), 1);
    from = Math.min(Math.max(begin, 0), 1 - length);
    to = from + length;
    draw();
  }

  function zoom(factor, at = (from + to) / 2) {
    show(at - (at - from) * factor, at + (to - at) * factor);
  }

  function choose(r, e) {
    row = Math.min(Math.max(r, 0), data.rows.length - 1);
    const all = events(row);
    event = Math.min(Math.max(e, 0), all.length - 1);
    if (event < 0) { said.textContent = `${data.rows[row].title}: nothing`; draw(); return; }
    const [, , , begin, end] = all[event], middle = (begin + end) / 2e6, half = (to - from) / 2;
    said.textContent = sentence(row, all[event]);
    if (middle < from || middle > to) show(middle - half, middle + half); else draw();
  }

  const pan = share => show(from + share * (to - from), to + share * (to - from));
  const acts = { in: () => zoom(0.5), out: () => zoom(2), earlier: () => pan(-0.5),
    later: () => pan(0.5), whole: () => show(0, 1) };
  const keys = { "+": acts.in, "=": acts.in, "-": acts.out, "0": acts.whole, Home: acts.whole,
    PageUp: acts.earlier, PageDown: acts.later, ArrowRight: () => choose(row, event + 1),
    ArrowLeft: () => choose(row, event - 1), ArrowDown: () => choose(row + 1, event),
    ArrowUp: () => choose(row - 1, event) };
  document.querySelectorAll("[data-act]").forEach(button =>
    button.addEventListener("click", () => acts[button.dataset.act]()));
  box.addEventListener("keydown", key => {
    if (!keys[key.key] || key.ctrlKey || key.metaKey || key.altKey) return;
    key.preventDefault();
    keys[key.key]();
  });
  const shareAt = pointer => {
    const place = box.getBoundingClientRect();
    return from + (pointer.clientX - place.left) / place.width * (to - from);
  };
  box.addEventListener("pointermove", pointer => {
    const mark = pointer.target.dataset && pointer.target.dataset.e;
    if (!mark) return;
    const [r, l, e] = mark.split(",").map(Number);
    said.textContent = sentence(r, [l, e, ...data.rows[r].lanes[l][e]]);
  });
  box.addEventListener("pointerdown", pointer => { pressed = shareAt(pointer); });
  box.addEventListener("pointerup", pointer => {
    const [begin, end] = [pressed, shareAt(pointer)].sort((a, b) => a - b);
    if (pressed !== null && end - begin > 0.01 * (to - from)) show(begin, end);
    pressed = null;
  });
  box.addEventListener("wheel", wheel => {
    if (!wheel.ctrlKey) return;
    wheel.preventDefault();
    zoom(wheel.deltaY > 0 ? 1.25 : 0.8, shareAt(wheel));
  }, { passive: false });
  window.addEventListener("resize", draw);
  window.matchMedia("print").addEventListener("change", draw);
  draw();
})();

// A plot of points with axes. It is one keyboard stop; arrow keys move between points.

const MARGIN = { top: 28, right: 16, bottom: 42, left: 58 };

/** Round steps that cover a range. */
function ticks(low, high, most) {
  const rough = (high - low || 1) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

/** Sizes that double from a round one, as far as a range goes. */
function doublings(low, high, most) {
  const factor = 2 ** Math.ceil(Math.log2(high / low) / most);
  const power = 10 ** Math.floor(Math.log10(low));
  const first = [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((digit) => digit * power).find((one) => one >= low);
  const length = Math.floor(Math.log(high / first) / Math.log(factor)) + 1;
  return Array.from({ length }, (_, i) => first * factor ** i);
}

/** A range slightly larger than the range of some numbers. */
function padded(values, share = 0.08) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  const more = (high - low || Math.abs(high) || 1) * share;
  return [low - more, high + more];
}

/**
 * Draw points {x, y, ends, kind, text, label, open} into a figure, now and whenever its width changes. `ends` are those
 * of an error bar.
 *
 * frame: {name, height, x, y}; an axis is {name, range, ticks: (pixels) => [[value, text]]}, and may have
 * a scale and a grid; `lines` are lists of points that a line joins, [kind, points].
 */
function plot(figure, points, frame, lines = []) {
  const readout = html("output", { class: "readout", "aria-live": "polite" }, frame.hint);
  const holder = html("div");
  figure.replaceChildren(holder, readout, downloads(holder, frame.name));
  let at = -1;
  let width = 0;

  function to({ range, scale = (value) => value }, from, until) {
    const [low, high] = range.map(scale);
    return (value) => from + ((scale(value) - low) / (high - low)) * (until - from);
  }
  const pixel = () => ({
    x: to(frame.x, MARGIN.left, width - MARGIN.right),
    y: to(frame.y, frame.height - MARGIN.bottom, MARGIN.top),
  });

  function choose(index) {
    at = index;
    const { x, y } = pixel();
    const point = points[at];
    build(find(".cursor", holder), { cx: x(point.x), cy: y(point.y), visibility: "visible" }, []);
    if (readout.textContent !== point.text) readout.textContent = point.text;
  }

  function nearest(event) {
    const box = find("svg", holder).getBoundingClientRect();
    const { x, y } = pixel();
    const far = (p) => (x(p.x) + box.left - event.clientX) ** 2 + (y(p.y) + box.top - event.clientY) ** 2;
    return points.reduce((best, p, i) => (far(p) < far(points[best]) ? i : best), 0);
  }

  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  function press(event) {
    if (event.key in steps) choose(clamped(at + steps[event.key], [0, points.length - 1]));
    else if (event.key === "Enter" && at >= 0) points[at].open?.();
    else return;
    event.preventDefault();
  }

  function draw() {
    const { x, y } = pixel();
    const bottom = frame.height - MARGIN.bottom;
    const right = width - MARGIN.right;
    const grid = frame.y.ticks(frame.height).map(([value, text]) => [
      svg("line", { x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, text),
    ]);
    const below = frame.x.ticks(right - MARGIN.left).map(([value, text]) => [
      frame.x.grid && svg("line", { class: "faint", x1: x(value), x2: x(value), y1: MARGIN.top, y2: bottom }),
      svg("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, text),
    ]);
    const joined = lines.map(([kind, ends]) =>
      svg("polyline", { class: kind, points: ends.map((p) => `${x(p.x)},${y(p.y)}`).join(" ") }));
    const shown = points.map((p) => p.square
      ? svg("rect", { class: p.kind, x: x(p.x) - 3, y: y(p.y) - 3, width: 6, height: 6 })
      : svg("circle", { class: p.kind, cx: x(p.x), cy: y(p.y), r: frame.radius }));
    const endsOf = (p) => (p.ends || [p.y, p.y]).map((end) => y(clamped(end, frame.y.range))).sort((a, b) => a - b);
    const bars = points.filter((p) => p.ends).map((p) => {
      const [[top, low], middle] = [endsOf(p), x(p.x)];
      const d = `M${middle} ${top}V${low}M${middle - 4} ${top}h8M${middle - 4} ${low}h8`;
      return svg("path", { class: `bar ${p.kind}`, d });
    });
    const taken = points.map((p) => [x(p.x) - 5, endsOf(p)[0] - 5, x(p.x) + 5, endsOf(p)[1] + 5]);
    const inside = [MARGIN.left, MARGIN.top - 8, width, bottom];
    const labels = labelsOf(points.map((p) => ({ ...p, x: x(p.x), y: y(p.y) })), inside, taken);
    holder.replaceChildren(svg(
      "svg",
      {
        width, height: frame.height, viewBox: `0 0 ${width} ${frame.height}`, tabindex: 0, role: "group",
        "aria-roledescription": "plot", "aria-label": `${frame.name}: ${points.length} points`,
        keydown: press,
        focus: () => choose(Math.max(at, 0)),
        pointermove: (event) => choose(nearest(event)),
        click: (event) => { choose(nearest(event)); points[at].open?.(); },
      },
      svg("g", { class: "grid", "aria-hidden": "true" }, grid, below),
      svg("text", { class: "axis", x: right, y: frame.height - 6, "text-anchor": "end" }, frame.x.name),
      svg("text", { class: "axis", x: 0, y: 12 }, frame.y.name),
      joined, bars, shown, labels, svg("circle", { class: "cursor", r: 8, visibility: "hidden" }),
    ));
    if (at >= 0) choose(at);
  }

  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now > 0 && now !== width) {
      width = now;
      draw();
    }
  }).observe(figure);
}

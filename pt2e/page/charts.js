// Two charts: noise by depth, and the exponents of an operand's blocks.

/** The number of the layer in a module's name, null where it has none. */
const layerOf = (operator) => /(?:^|\.)(\d+)(?:\.|$)/.exec(operator.module)?.[1] ?? null;

// a smaller range would exaggerate small differences
const LEAST_DECIBELS = 15;

/** The SQNR of every operand by the position of its operator; outliers are labelled in the plot and listed below. */
function drawDepth(section, open) {
  const points = operators.flatMap((operator, x) => operator.operands.filter((o) => o.spec && o.seen).map((o) => ({
    x, y: number(o.seen.noise[0]), operand: o, operator, square: o.role !== "weight",
    kind: `${o.role === "weight" ? "weight" : "activation"}${o.below === null ? "" : " outlier"}`,
    label: o.below === null ? null : nameOf(operator),
    text: `${nameOf(operator)}, ${o.role} in ${o.spec}: ${decibels(number(o.seen.noise[0]))} dB`,
    open: () => open(x),
  }))).filter((point) => !Number.isNaN(point.y));
  const finite = points.filter((p) => Number.isFinite(p.y)).map((p) => p.y);
  if (!finite.length) return;
  section.hidden = false;
  const range = padded(finite);
  range[0] = Math.min(range[0], range[1] - LEAST_DECIBELS);
  for (const point of points) point.y = clamped(point.y, range);
  const starts = operators.map((operator, x) => [x, layerOf(operator)])
    .filter(([x, layer], i, all) => layer !== null && layer !== all[i - 1]?.[1]);
  const layers = starts.length > 2;
  const whole = ticks(1, operators.length, 8).filter(Number.isInteger);
  const thin = (pixels) => starts.filter((_, i) => i % Math.ceil((starts.length * 26) / pixels) === 0);
  plot(find(".plot", section), points, {
    name: "SQNR by depth", height: 300, radius: 3.2,
    hint: "Point at an operand, or move between them with the arrow keys.",
    x: {
      name: layers ? "layer" : "operator", range: [-0.5, operators.length - 0.5], grid: layers,
      ticks: (pixels) => (layers ? thin(pixels) : whole.map((n) => [n - 1, `${n}`])),
    },
    y: { name: "SQNR, dB", range, ticks: () => ticks(...range, 6).map((v) => [v, `${v}`]) },
  });
  find(".plot", section).append(html(
    "figcaption", { class: "legend" },
    html("span", { class: "weight" }, "weights"), html("span", { class: "activation" }, "activations"),
  ));
  drawOutliers(find(".outliers", section), points.filter((p) => p.operand.below !== null));
}

function drawOutliers(place, points) {
  const worst = points.sort((a, b) => number(b.operand.below) - number(a.operand.below));
  const below = (operand) => (operand.below === "Infinity"
    ? "its signal was lost entirely" : `${decibels(operand.below)} dB below the median of its format`);
  place.replaceChildren(...present(
    html("h3", {}, worst.length ? "Outliers" : "No outliers"),
    worst.length ? html("ul", {}, worst.slice(0, 12).map((point) => html(
      "li", {}, html("button", { type: "button", class: "link", click: point.open }, nameOf(point.operator)),
      ` ${point.operand.role}, ${decibels(number(point.operand.seen.noise[0]))} dB: ${below(point.operand)}`,
    ))) : html("p", {}, "Every operand is within the spread of its role and format."),
    worst.length > 12 && html("p", {}, `and ${worst.length - 12} more: choose “outliers” in the table`),
  ));
}

/** A histogram of blocks by shared exponent; its accessible name has the numbers. */
function histogram(pairs) {
  const bars = pairs.filter((_, i) => i % 2 === 0).map((exponent, i) => [exponent, pairs[2 * i + 1]]);
  if (!bars.length) return null;
  const [width, height] = [280, 72];
  const least = bars[0][0];
  const largest = bars[bars.length - 1][0];
  const most = Math.max(...bars.map(([, blocks]) => blocks));
  const mode = bars.find(([, blocks]) => blocks === most)[0];
  const step = Math.min(width / (largest - least + 1), 24);
  const drawn = bars.map(([exponent, blocks]) => svg(
    "rect", {
      x: (exponent - least) * step, y: height * (1 - blocks / most),
      width: Math.max(step - 1, 0.5), height: Math.max((height * blocks) / most, 1),
    },
    svg("title", {}, `${powerOfTwo(exponent)}: ${count(blocks)} blocks`),
  ));
  const name = `Blocks by shared exponent, from ${powerOfTwo(least)} to ${powerOfTwo(largest)}, `
    + `most at ${powerOfTwo(mode)}`;
  const end = Math.max((largest - least + 1) * step, 56);
  const figure = html(
    "figure", { class: "histogram" },
    svg("svg", { viewBox: `0 0 ${width} ${height + 16}`, role: "img", "aria-label": name }, drawn,
      svg("line", { x1: 0, x2: width, y1: height + 0.5, y2: height + 0.5 }),
      svg("text", { x: 0, y: height + 13 }, powerOfTwo(least)),
      largest > least && svg("text", { x: end, y: height + 13, "text-anchor": "end" }, powerOfTwo(largest))),
    html("figcaption", {}, "blocks by shared exponent"),
  );
  figure.append(downloads(figure, "blocks by shared exponent"));
  return figure;
}

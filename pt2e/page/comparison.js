// The recipes that were compared: the recommendation, quality against size, and a table.

/** The plot and the table of the recipes. */
function drawComparison(section) {
  if (!data.comparison) return;
  section.hidden = false;
  const { metric, scale, advice, larger_is_better: up } = data.comparison;
  const rows = data.comparison.rows.map((row) => ({
    ...row, quality: number(row.quality), error: number(row.error), y: number(row.y),
    milliseconds: number(row.milliseconds), own: row.name === data.recipe.name,
  }));
  // a model without parameters has no logarithm of its size, and one without loss none of its loss
  const plotted = rows.filter((row) => row.bytes && Number.isFinite(row.y) && (scale === "linear" || row.y > 0));
  const exact = rows.filter((row) => row.bytes && row.y === (scale === "linear" ? Infinity : 0)).map((row) => row.name);
  const beyond = plotted.length && exact.length ? ` Without loss, and so not in the plot: ${exact.join(", ")}.` : "";
  const bars = plotted.some((row) => row.error > 0) ? " The bars are 95 % intervals." : "";
  find(".advice", section).textContent = advice;
  find(".lead", section).textContent = `${metric} against size; ${up ? "more" : "less"} is better. `
    + `The line joins the Pareto-optimal recipes.${bars}${beyond}`;
  plotComparison(find(".plot", section), metric, scale, plotted);
  const timed = rows.some((row) => !Number.isNaN(row.milliseconds));
  const line = (row) => html(
    "tr", { class: row.own && "own" },
    html("th", { scope: "row" }, breakable(row.name), row.on_front && html("span", { class: "badge good" }, "front"),
      row.note && html("span", { class: "note" }, row.note),
      row.tied && html("span", { class: "note" }, "too few samples to rank it against ", breakable(row.tied))),
    html("td", {}, row.bytes ? sizeText(row.bytes) : "–"), html("td", {}, significant(number(row.bits))),
    html("td", {}, comparedText(row)), timed && html("td", {}, significant(row.milliseconds)),
  );
  const head = ["recipe", "size", "bits", metric, ...(timed ? ["ms"] : [])];
  find(".scroll", section).append(plainTable(head, rows.map(line)));
  if (data.comparison.speed) section.append(...speedTable(data.comparison.speed));
}

/** The times of the recipes and of the float models, and how they were measured. */
function speedTable({ method, rows }) {
  const line = ({ name, milliseconds: times, note }) => html(
    "tr", {}, html("th", { scope: "row" }, breakable(name), note && html("span", { class: "note" }, note)),
    html("td", {}, times ? significant(times.median) : "–"),
    html("td", {}, times ? `${significant(times.low)} to ${significant(times.high)}` : ""),
  );
  return [html("div", { class: "scroll", tabindex: "0" }, plainTable(["model", "ms", "interval"], rows.map(line))),
    html("p", { class: "lead" }, method)];
}

/** The quality; a cosine to three digits of its distance from 1. */
const comparedText = (row) => (data.comparison.scale === "from one" && row.y > 0 && row.y < 0.1
  ? (1 - row.y).toFixed(clamped(2 - Math.floor(Math.log10(row.y)), [4, 9])) : qualityText(row.quality));
const withError = (row) => `${comparedText(row)}${row.error > 0 ? ` ± ${significant(row.error, 2)}` : ""}`;

/** Tick values on a logarithmic scale: 1, 2 and 5 of each power of ten, or as many powers as fit. */
function decades(low, high, most) {
  const [first, last] = [low, high].map((value) => Math.floor(Math.log10(value)));
  const powers = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  const within = (digits) => powers.flatMap((power) => digits.map((digit) => digit * 10 ** power))
    .filter((value) => value >= low && value <= high);
  const round = within([1, 2, 5]);
  if (round.length < 3) return within([1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]);
  if (round.length <= most) return round;
  const tens = within([1]);
  return tens.filter((_, i) => i % Math.ceil(tens.length / most) === 0);
}

/** The y axis: linear, logarithmic, or for a cosine logarithmic in its distance from 1, which grows downwards. */
function qualityAxis(metric, scale, rows) {
  const ends = rows.flatMap(({ y, error }) => (error > 0 ? [y - error, y, y + error] : [y]));
  if (scale === "linear") {
    const range = padded(ends);
    const digits = clamped(1 - Math.floor(Math.log10(range[1] - range[0])), [0, 6]);
    return {
      name: metric, range, ticks: (pixels) => ticks(...range, pixels / 50).map((v) => [v, v.toFixed(digits)]),
    };
  }
  const least = Math.min(...rows.map((row) => row.y)) / 3; // a bar that reaches 0 has no end
  const range = padded(ends.map((end) => Math.log(Math.max(end, least)))).map(Math.exp);
  const fromOne = scale === "from one";
  const digits = (v) => Math.max(-Math.floor(Math.log10(v) + 1e-9), 0);
  const text = (v) => (fromOne ? `${Number((1 - v).toFixed(digits(v) + 1))}` : significant(v, 2));
  return {
    name: `${metric}, on a logarithmic scale${fromOne ? " of 1 − cosine" : ""}`,
    range: fromOne ? range.toReversed() : range, scale: Math.log,
    ticks: (pixels) => decades(...range, pixels / 36).map((v) => [v, text(v)]),
  };
}

function plotComparison(figure, metric, scale, rows) {
  figure.hidden = !rows.length;
  if (figure.hidden) return;
  const points = rows.map((row) => ({
    x: row.bytes,
    y: row.y,
    ends: row.error > 0 && [row.y - row.error, row.y + row.error],
    kind: `recipe${row.on_front ? " front" : ""}${row.own ? " own" : ""}`,
    label: row.name,
    bold: row.on_front,
    text: `${row.name}: ${metric} ${withError(row)}, ${sizeText(row.bytes)}, ${significant(row.bits)} bits`,
  }));
  const sizes = points.map((p) => p.x);
  const x = [Math.min(...sizes) / 1.15, Math.max(...sizes) * 1.15];
  plot(figure, points, {
    name: `${metric} against bytes`, height: 380, radius: 5,
    hint: "Point at a recipe, or move between them with the arrow keys.",
    x: {
      name: "size, on a logarithmic scale", range: x, scale: Math.log,
      ticks: (pixels) => (x[1] / x[0] < 4 ? ticks : doublings)(...x, pixels / 70).map((value) => [value, sizeText(value)]),
    },
    y: qualityAxis(metric, scale, rows),
  }, [["front", points.filter((p) => p.bold)]]);
}

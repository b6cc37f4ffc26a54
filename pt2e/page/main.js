// The page: the main numbers, then the sections that have content.

const answer = (value, unit, name, note) => html(
  "div", {}, html("dt", {}, name),
  html("dd", {}, html("span", { class: "large" }, value), unit && html("span", { class: "unit" }, unit),
    note && html("span", { class: "note" }, note)),
);

function drawHead() {
  const { before, after, bits, weightBits, quantized } = data.totals;
  const [value, unit] = size(after);
  find("#recipe-name").append(...(data.recipe.name ? ["in ", html("b", {}, data.recipe.name)] : []));
  const [best, ...others] = data.quality.map(([name, quality]) => [name, number(quality)]);
  const smaller = before >= 1.05 * after ? `${(before / after).toFixed(1)}× less than` : "of";
  const ofWeights = weightBits > 0 && `${significant(weightBits)} of the quantized weights`;
  const compared = best?.[0] === data.comparison?.metric && "against the float model";
  const more = others.map(([name, quality]) => `${name} ${qualityText(quality)}`).join(", ");
  find("#answers").append(...present(
    answer(value, unit, "parameters", `${smaller} ${sizeText(before)}`),
    answer(significant(bits), null, "bits per value", ofWeights),
    best && answer(qualityText(best[1]), null, best[0], more || compared),
    answer(count(quantized), `of ${count(operators.length)}`, "operators quantized", null),
  ));
}

/** A bar of the bytes by format. */
function drawDivision(figure) {
  const total = data.formats.reduce((sum, [, size]) => sum + size, 0);
  if (!total) return;
  figure.hidden = false;
  const [width, gap] = [1000, 2];
  const colour = (name, i) => (name === null ? "rest" : `share-${i % 5}`);
  let x = 0;
  const bars = data.formats.map(([name, size], i) => {
    const extent = (width * size) / total;
    x += extent;
    return svg("rect", { class: colour(name, i), x: x - extent, width: Math.max(extent - gap, 1), height: 10 });
  });
  figure.append(
    svg("svg", { viewBox: `0 0 ${width} 10`, preserveAspectRatio: "none", "aria-hidden": "true" }, bars),
    html("figcaption", { class: "legend" }, data.formats.map(([name, size], i) => html(
      "span", { class: colour(name, i) }, `${name ?? "high precision"} ${sizeText(size)}`))),
  );
}

function drawRecipe(section) {
  if (!data.recipe.text) return;
  section.hidden = false;
  const code = find("code", section);
  code.textContent = data.recipe.text;
  find("button", section).addEventListener("click", async () => {
    let copied = true;
    try {
      await navigator.clipboard.writeText(data.recipe.text);
    } catch {
      getSelection().selectAllChildren(code); // the fallback where a page from a file may not copy
      copied = document.execCommand("copy");
    }
    find(".status", section).textContent = copied ? "Copied." : "Selected: press Ctrl+C.";
  });
}

/** Links to the visible sections. */
function drawNavigation(place) {
  const there = [...document.querySelectorAll("main > section")].filter((section) => !section.hidden);
  place.append(...there.map((section) => html("a", { href: `#${section.id}` }, find("h2", section).textContent)));
}

drawHead();
drawDivision(find("#division"));
const showGraph = graphView(find("#graph"));
const openOperator = operatorTable(showGraph);
drawComparison(find("#comparison"));
drawDepth(find("#depth"), openOperator);
drawRecipe(find("#recipe"));
drawNavigation(find("nav"));
document.documentElement.dataset.ready = performance.now().toFixed(0);

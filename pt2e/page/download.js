// Downloads of a drawing for a paper, as SVG and as PNG, in the colours of the page.

/** What the style sheet gives to a drawing; in a file of its own these are attributes. */
const DRAWN = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "paint-order", "font-family",
  "font-size", "font-weight", "visibility"];
// pixels of a PNG per unit of its drawing: 96 units are an inch
const SHARPNESS = 300 / 96;

/** A drawing as the text of an SVG file, with its width and height. */
function svgFile(drawing) {
  const copy = drawing.cloneNode(true);
  const originals = drawing.querySelectorAll("*");
  [...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of DRAWN) node.setAttribute(name, style.getPropertyValue(name));
    if (node.matches(".cursor")) node.remove();
    for (const name of ["class", "tabindex", "role"]) node.removeAttribute(name);
  });
  const { x, y, width, height } = drawing.viewBox.baseVal;
  build(copy, { width, height }, []);
  copy.prepend(svg("rect", { x, y, width, height, fill: getComputedStyle(document.body).backgroundColor }));
  // half of a surrogate pair, which a name may hold, has no encoding
  const text = new XMLSerializer().serializeToString(copy).replace(/[\ud800-\udfff]/gu, "\ufffd");
  return { text, width, height };
}

async function pngBlob({ text, width, height }) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = html("canvas", { width: Math.round(width * SHARPNESS), height: Math.round(height * SHARPNESS) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
}

const FILES = {
  SVG: async (file) => new Blob([file.text], { type: "image/svg+xml" }),
  PNG: pngBlob,
};

/** Two buttons that save the drawing inside an element. */
function downloads(holder, name) {
  async function save(kind) {
    const href = URL.createObjectURL(await FILES[kind](svgFile(find("svg", holder))));
    const stem = `${data.model} ${name}`.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(-80);
    html("a", { href, download: `${stem}.${kind.toLowerCase()}` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 1000);
  }
  return html(
    "p", { class: "downloads" }, "Save as ",
    Object.keys(FILES).map((kind) => html(
      "button", { type: "button", class: "link", "aria-label": `Save ${name} as ${kind}`, click: () => save(kind) },
      kind)),
  );
}

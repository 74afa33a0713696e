// Making elements. Text always becomes a text node, so that no name or log can turn into markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element. `props`: attributes, and handlers under names such as `onclick`. Children: nodes or text. */
export function el(name, props = {}, ...children) {
  return fill(document.createElement(name), props, children);
}

/** Return an element of a picture. */
export function svg(name, props = {}, ...children) {
  return fill(document.createElementNS(SVG, name), props, children);
}

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Show other children in an element, and leave it alone where nothing changed. */
export function show(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Change a text, unless it is the same. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Return a link to a page of the dashboard. */
export function link(hash, ...children) {
  return el("a", { href: `#${hash}` }, ...children);
}

/** Return a chip with a status. */
export function chip(status) {
  return el("span", { class: `chip chip-${status}` }, status);
}

/** Return a bar for a share between 0 and 1. */
export function bar(share, label) {
  const meter = el("progress", { max: 1, value: share, "aria-label": label });
  return el("span", { class: "meter" }, meter, el("span", { class: "meter-text" }, `${Math.floor(share * 100)} %`));
}

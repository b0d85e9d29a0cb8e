// Elements, addresses and numbers. What models write reaches the page as text nodes only.

const HIDDEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const ATTRIBUTES = new Set(["class", "id", "type", "value", "placeholder", "title", "for", "name", "min", "max", "step",
  "checked", "selected", "open", "tabindex", "scope", "role", "colspan", "disabled", "aria-label", "aria-current",
  "aria-sort", "aria-live"]);

// Return a text with control characters and direction marks made visible.
export function visible(text) {
  return String(text).replace(HIDDEN, (letter) => {
    const code = letter.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });
}

// Return an element; `on` holds listeners, `href` must be an address of the viewer itself.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "href") {
      if (!value.startsWith("#")) throw new Error(`the address ${value} leads out of the viewer`);
      element.setAttribute("href", value);
    } else if (!ATTRIBUTES.has(name)) {
      throw new Error(`the attribute ${name} is not allowed`);
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined)
    .map((child) => (child instanceof Node ? child : visible(child))));
  return element;
}

// Return text of others in its own direction.
export const told = (text, attributes = {}) => el("bdi", attributes, text);

const LONG = 4000;

// Return a text, the rest of a long one behind a button.
export function longText(text) {
  const box = el("div", { class: "text" }, told(text.slice(0, LONG)));
  if (text.length > LONG) {
    const more = el("button", { type: "button", on: { click: () => box.replaceChildren(told(text)) } },
      `show all ${text.length} characters`);
    box.append(" ", more);
  }
  return box;
}

// Return a number with four digits, from 1000 on rounded to an integer, below 1e-12 as 0; empty for none.
export function number(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  return String(size >= 1000 ? Math.round(value) : size < 1e-12 ? 0 : Number(Number(value).toPrecision(4)));
}
export const counted = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;
// Return a mean with its interval, in two digits of the half width; `unknown` where both bounds are infinite.
export function estimate(mean, bounds, unknown = "") {
  if (!bounds || bounds.every((bound) => bound === null)) return number(mean) + (bounds ? unknown : "");
  const digits = 1 - Math.floor(Math.log10((bounds[1] - bounds[0]) / 2));
  // More digits are those of rounding or of a very small number.
  const text = [mean, ...bounds].some((value) => typeof value !== "number") || digits > 8 ? number : (value) => value.toFixed(Math.max(0, digits));
  return `${text(mean)} [${text(bounds[0]) || "−∞"}, ${text(bounds[1]) || "∞"}]`;
}

// Return the address of a view.
export function address(view, parameters = {}) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `#${view}?${new URLSearchParams(kept)}`;
}

export const link = (text, view, parameters) => el("a", { href: address(view, parameters) }, told(text));

// Return the current view and its parameters.
export function place() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: view || "runs", parameters: Object.fromEntries(new URLSearchParams(query || "")) };
}

// Change parameters of the address without a new entry in the history.
export function remember(changes) {
  const { view, parameters } = place();
  history.replaceState(history.state, "", address(view, { ...parameters, ...changes }));
}

const stored = document.getElementById("data");
const EXPORTED = stored ? JSON.parse(stored.textContent) : null;
export const isExported = EXPORTED !== null;

// Return the data of an address below /api/; an exported page holds its own.
export async function get(path, parameters = {}) {
  const query = Object.entries(parameters).filter(([name, value]) => value !== undefined && !(EXPORTED && (name === "first" || name === "last")));
  if (EXPORTED) {
    const key = query.length ? `${path}?${query.map((pair) => pair.join("=")).join("&")}` : path;
    const held = Object.hasOwn(EXPORTED, key) ? EXPORTED[key] : null;
    if (held !== null) return typeof held === "string" ? EXPORTED[held] : held;
    throw new Error("the exported page does not hold this; open the run with `mrlm view`");
  }
  const reply = await fetch(`api/${path}?${new URLSearchParams(query)}`).catch(() => {
    throw new Error("the viewer does not answer: start `mrlm view` again");
  });
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.error || reply.statusText);
  return found;
}

// Change parameters of the address and draw the view again.
export function go(changes) {
  remember(changes);
  dispatchEvent(new Event("hashchange"));
}

export const cell = (...children) => el("td", {}, ...children);
export const numberCell = (value) => el("td", { class: "number" }, number(value));
export const estimateCell = (mean, bounds) => el("td", { class: "number" }, estimate(mean, bounds));
export const filters = (...fields) => el("form", { class: "filters", on: { submit: (event) => event.preventDefault() } }, ...fields);

// Return a table; the head of a column is aligned as its cells.
export function table(heads, rows, attributes = {}) {
  const cells = heads.map((head) => (head instanceof Node ? head : el("th", { scope: "col" }, head)));
  cells.forEach((head, column) => head.classList.toggle("number", Boolean(rows[0]?.children[column]?.classList.contains("number"))));
  return el("div", { class: "scroll" }, el("table", attributes,
    el("thead", {}, el("tr", {}, cells)),
    el("tbody", {}, rows)));
}

export function choice(label, options, value, change) {
  const select = el("select", { on: { change: () => change(select.value) } },
    options.map(([key, text]) => el("option", { value: key, selected: key === value }, text)));
  return el("label", {}, label, " ", select);
}

// Return a command with a button that copies it.
export function command(words) {
  if (words.some((word) => word === null)) return null;
  const quoted = words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`));
  const text = quoted.join(" ");
  const code = el("code", {}, text), button = el("button", { type: "button", on: { click: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {  // browsers offer the clipboard to this machine and to encrypted connections alone
      getSelection().selectAllChildren(code);
      button.textContent = "selected: copy it by the keyboard";
    }
  } } }, "copy");
  return el("p", { class: "command" }, code, " ", button);
}

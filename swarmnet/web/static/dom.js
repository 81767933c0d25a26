/** Helpers that build and update DOM nodes. Strings become text nodes: no function here parses markup. */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes, `on…` listeners and children (nodes or text; null is left out). */
export function h(tag, attributes = {}, ...children) {
  return assemble(document.createElement(tag), attributes, children);
}

/** An SVG element, as `h`. */
export function s(tag, attributes = {}, ...children) {
  return assemble(document.createElementNS(SVG, tag), attributes, children);
}

function assemble(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** Sets the text if it differs: a write would clear selections and make screen readers repeat it. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Sets a style through the DOM, which the Content-Security-Policy allows; style attributes it does not. */
export function setStyle(node, name, value) {
  if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
}

/**
 * Makes the children of `parent` match `items`, in order, and reuses the nodes whose key is still there.
 * `make(item)` returns a node for a new key; `update(node, item)` is called for every item.
 */
export function reconcile(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const id = String(key(item));
    let node = old.get(id);
    if (node) old.delete(id);
    else {
      node = make(item);
      node.dataset.key = id;
    }
    update(node, item);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  for (const node of old.values()) node.remove();
}

/** A button that copies the text of `node`. */
export function copyButton(name, node, text = () => node.textContent) {
  const label = h("span", {}, "Copy");
  const button = h("button", { type: "button", class: "copy", "aria-label": name }, label);
  button.addEventListener("click", async () => {
    let done = false;
    try {
      await navigator.clipboard.writeText(text());
      done = true;
    } catch {
      getSelection().selectAllChildren(node); // browsers have no clipboard without https: select the text instead
    }
    label.textContent = done ? "Copied" : "Selected";
    announce(done ? "Copied" : "Selected: copy it with the keyboard");
    setTimeout(() => { label.textContent = "Copy"; }, 1600);
  });
  return button;
}

/** A command with a button that copies it. */
export function commandNode(command) {
  const code = h("code", {});
  const setCommand = (text) => {
    if (code.textContent !== text) code.replaceChildren(...text.split(/( )/).map((word) => (word === " " ? word : h("span", {}, word)))); // spans, so that lines break between words only
  };
  setCommand(command);
  const button = copyButton("Copy the command", code);
  const node = h("div", { class: "command" }, code, button);
  node.setCommand = setCommand;
  return node;
}

/** Announces `text` to screen readers. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** A section of the page with a heading. `aside`: controls to the right of the heading. */
export function panel(title, { id, aside = [], level = 2, note = null } = {}, ...children) {
  const heading = h(`h${level}`, { id: `${id}-title` }, title);
  return h("section", { class: "panel", id, "aria-labelledby": `${id}-title` },
    h("div", { class: "panel-head" }, heading, note, h("div", { class: "panel-aside" }, aside)), children);
}

/** A segmented control: one of several choices is pressed. Calls `choose(value)`. */
export function segmented(label, choices, chosen, choose) {
  const buttons = choices.map(([value, text]) => h("button", {
    type: "button", "aria-pressed": String(value === chosen),
    onclick: () => {
      buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(choices[at][0] === value)));
      choose(value);
    },
  }, text));
  return h("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
}

const THEMES = [["system", "as the system"], ["light", "light"], ["dark", "dark"]];

/** Lets a button choose the colours of the page (`theme.js`): as the system, light, dark. */
export function cycleTheme(button) {
  const { colours } = window;
  const at = () => THEMES.findIndex(([name]) => name === colours.chosen);
  const label = () => setAttribute(button, "aria-label", `Colours: ${THEMES[at()][1]}`);
  button.addEventListener("click", () => {
    colours.choose(THEMES[(at() + 1) % THEMES.length][0]);
    label();
  });
  label();
}

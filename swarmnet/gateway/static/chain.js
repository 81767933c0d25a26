/** The chain of an answer: its hosts light up as they compute, and a click shows where the time went. */

import { h, reconcile, setAttribute, setText } from "./dom.js";
import { plural, shortId, span } from "./format.js";
import { timesNode } from "./times.js";

const LEAST_MS = 90; // a shorter light is not seen

/** The node of the chain of `message`: {route, steps, busy}. */
export function chainNode(message) {
  const hops = h("span", { class: "hops" });
  const about = h("span", { class: "chain-about" });
  const button = h("button", { type: "button", class: "chain", "aria-expanded": "false" }, hops, about);
  const node = h("div", { class: "chain-box", hidden: true }, button);
  let times = null;
  let lit = 0; // steps whose light was shown
  let free_ms = 0; // when the last light has gone

  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    times?.remove();
    times = open ? node.appendChild(timesNode(message)) : null;
  });

  node.update = () => {
    const { route, steps, busy } = message;
    node.hidden = !route?.length;
    if (!route?.length) return;
    reconcile(hops, route, (hop) => `${hop.peer} ${hop.start}`, hopNode, (each, hop) => each.classList.toggle("lost", Boolean(busy && hop.peer === message.killed)));
    const has = Boolean(steps?.length);
    button.disabled = !has;
    setAttribute(button, "aria-label", `${plural(route.length, "host")}, blocks ${route.map((hop) => span([hop.start, hop.end])).join(", ")}${has ? ": show where the time went" : ""}`);
    const waits = busy && route.some((hop) => hop.peer === message.killed);
    setText(about, waits ? "This host was killed. Another one takes its place." : has && !busy ? "Where the time went" : "");
    button.classList.toggle("waits", Boolean(waits));
    if (busy && has && steps.length > lit) light(steps.at(-1));
    lit = steps?.length ?? 0;
    if (times && !busy) times.update();
  };

  function light({ hops: stays }) {
    const now = performance.now();
    if (now < free_ms || stays.length !== hops.children.length || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    let at_ms = 0;
    stays.forEach(({ compute_s, wire_s, wait_s, send_s }, index) => {
      at_ms += (wire_s + wait_s) * 1000;
      const lasts_ms = Math.max(LEAST_MS, compute_s * 1000);
      hops.children[index].animate([{}, { backgroundColor: "var(--lit)", borderColor: "var(--lit-line)", offset: 0.35 }, {}], { delay: at_ms, duration: lasts_ms, easing: "ease-out" });
      at_ms += Math.max(LEAST_MS / 2, (compute_s + send_s) * 1000);
    });
    free_ms = now + at_ms;
  }

  return node;
}

function hopNode({ peer, start, end }) {
  return h("span", { class: "hop", title: `${peer}, blocks ${span([start, end])}` }, h("b", {}, span([start, end])), h("span", { class: "hop-id" }, shortId(peer)));
}

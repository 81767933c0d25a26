/** The entry point: chooses the page by the URL, gives it every new state, and shows the state of the connection. */

import { cycleTheme, setAttribute, setText } from "./dom.js";
import { clock, shortId } from "./format.js";
import { overviewPage } from "./pages/overview.js";
import { follow } from "./state.js";
import { admission } from "./words.js";

const $ = (id) => document.getElementById(id);
const LINKS = { live: "Live", polled: "Every 10 s", lost: "Not connected" };

async function route(path) {
  const [, kind, id] = path.split("/");
  if (kind === "peers" && id) return (await import("./pages/peer.js")).peerPage(decodeURIComponent(id));
  if (kind === "jobs" && id) return (await import("./pages/job.js")).jobPage(decodeURIComponent(id));
  return overviewPage();
}

function onLink({ state, since_s, retry_ms }) {
  setAttribute($("link"), "data-state", state);
  setText($("link-text"), LINKS[state]);
  document.body.classList.toggle("stale", state === "lost");
  $("banner").hidden = state === "live";
  setAttribute($("banner"), "data-state", state);
  const again = `${Math.max(1, Math.round((retry_ms ?? 0) / 1000))} s`;
  if (state === "lost") setText($("banner"), `The dashboard has not answered since ${clock(since_s)}. This page shows the state at that time. The next attempt is in ${again}.`);
  if (state === "polled") setText($("banner"), `The dashboard has reached its limit of live viewers. This page shows the state of ${clock(since_s)} and loads the next one in ${again}.`);
}

async function main() {
  cycleTheme($("theme"));
  const page = await route(location.pathname);
  let first = true;
  follow((state) => {
    const { swarm } = state;
    setText($("swarm-name"), swarm.name);
    setText($("admission"), admission(swarm.admission));
    $("admission").hidden = !swarm.admission;
    setText($("foot"), `Observed by ${shortId(swarm.observed_from)} · swarmnet ${swarm.version}`);
    page.update(state);
    const title = page.title(state);
    document.title = title === swarm.name ? `${title} · swarmnet` : `${title} · ${swarm.name}`;
    if (!first) return;
    first = false;
    $("main").replaceChildren(page.node);
    $("main").setAttribute("aria-busy", "false");
    document.getElementById(location.hash.slice(1))?.closest("section").scrollIntoView();
  }, onLink);
}

main();

// The views by their address, and the live refresh.
import { compareView, pairView } from "./compare.js";
import { creditView } from "./credit.js";
import { curvesView } from "./curves.js";
import { el, get, isExported, link, place } from "./dom.js";
import { episodeView } from "./episode.js";
import { episodesView } from "./episodes.js";
import { groupView } from "./group.js";
import { healthView } from "./health.js";
import { runsView, runView } from "./runs.js";
import { tokensView } from "./tokens.js";

const VIEWS = { runs: runsView, run: runView, curves: curvesView, episodes: episodesView, episode: episodeView,
  tokens: tokensView, group: groupView, credit: creditView, compare: compareView, pair: pairView, health: healthView };
const TABS = [["runs", "Runs"], ["curves", "Curves"], ["episodes", "Episodes"], ["compare", "Two runs"], ["health", "Health"]];
const LIVE = new Set(["runs", "run", "curves", "episodes", "health"]);
const SECONDS = 5;
const nav = document.getElementById("nav"), main = document.getElementById("main");
const offline = el("span", { role: "status" });
let drawing = 0, known = "";

async function draw({ scrolled = false } = {}) {  // scrolled: tables stay where they were scrolled aside
  const { view, parameters } = place();
  const own = (drawing += 1);
  nav.replaceChildren(...TABS.map(([name, text]) => {
    const tab = link(text, name, name === "runs" ? {} : { run: parameters.run });
    if (name === view) tab.setAttribute("aria-current", "page");
    return tab;
  }), offline);
  let parts;
  try {
    if (!(view in VIEWS)) throw new Error(`there is no view ${view}; choose one above`);
    parts = await VIEWS[view](parameters);
  } catch (error) {
    parts = [el("p", { class: "warning", role: "alert" }, error.message)];
  }
  if (own !== drawing) return;
  const aside = scrolled ? tables().map((box) => box.scrollLeft) : [];
  main.replaceChildren(...parts.flat(Infinity).filter(Boolean));
  aside.forEach((left, index) => tables()[index]?.scrollTo({ left }));
  document.title = `${main.querySelector("h1")?.textContent ?? view} · mrlm view`;
  main.dataset.ready = location.hash;
}

const tables = () => [...main.querySelectorAll(".scroll")];

async function refresh() {
  try {
    const { runs } = await get("runs");
    const now = JSON.stringify(runs.map((run) => [run.key, run.changed, run.state]));
    const typing = main.contains(document.activeElement) && document.activeElement !== main;
    if (known && now !== known && LIVE.has(place().view) && !typing) await draw({ scrolled: true });
    known = now;
    offline.textContent = "";
  } catch (error) {
    known = "";  // the server has ended or starts again; the page keeps what it shows
    offline.textContent = error.message;
  }
}

const fields = () => [...main.querySelectorAll(".filters :is(input, select, button)")];

history.scrollRestoration = "manual";  // a view has its height only when it is drawn
addEventListener("scrollend", () => history.replaceState(scrollY, ""));
addEventListener("hashchange", async ({ isTrusted }) => {  // false: `go` has changed parameters of this view
  const field = isTrusted ? -1 : fields().findIndex((one) => one.matches(":focus-visible"));
  await draw();
  if (isTrusted) scrollTo(0, history.state ?? 0);
  else fields()[field]?.focus();
});
if (!isExported) await refresh();  // a change after this moment is a change of what is drawn next
await draw();
scrollTo(0, history.state ?? 0);
if (!isExported) setInterval(refresh, SECONDS * 1000);

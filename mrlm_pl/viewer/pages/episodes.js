// The table of episodes, with filters and sorting; the state is in the address.
import { cell, choice, el, filters, get, link, number, numberCell, place, remember, table, told } from "./dom.js";

const PAGE = 100;
const SHOWN = [["id", "episode"], ["iteration", "iteration"], ["task", "task"], ["group", "group"], ["reward", "reward"],
  ["advantage", "advantage"], ["turns", "turns"], ["tokens", "tokens"], ["prompt", "prompt"], ["reply", "replies"],
  ["policies", "policies"], ["flags", "notes"]];
const FLAGS = [["flat", "group without variance"], ["error", "error"], ["truncated", "truncated by a limit"], ["length", "turn truncated at max_tokens"],
  ["tool_failure", "tool failure"], ["tree", "turn tree"], ["excluded", "not trained on"], ["success", "solved"], ["unsolved", "not solved"]];

// Return the episodes as objects, with the notes of each.
export function unpack({ columns, rows }) {
  const episodes = rows.map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]])));
  const groups = new Map();
  for (const episode of episodes.filter((one) => one.excluded !== "greedy" && !one.error)) {
    const key = `${episode.iteration} ${episode.group}`;
    const bounds = groups.get(key) ?? [Infinity, -Infinity, 0];
    groups.set(key, [Math.min(bounds[0], episode.reward), Math.max(bounds[1], episode.reward), bounds[2] + 1]);
  }
  for (const episode of episodes) {
    const [low, high, count] = groups.get(`${episode.iteration} ${episode.group}`) ?? [0, 1, 1];
    episode.flat = count > 1 && low === high;
    episode.unsolved = episode.success === false;
    episode.flags = FLAGS.filter(([name]) => episode[name] && name !== "tree").map(([name, text]) => (["error", "excluded"].includes(name) ? `${text}: ${episode[name]}` : text)).join(", ");
  }
  return episodes;
}

function keeps(filters) {
  const within = (value, low, high) => (low ? value >= Number(low) : true) && (high ? value <= Number(high) : true);
  return (episode) => within(episode.iteration, filters.from, filters.to) && within(episode.reward, filters.low, filters.high)
    && (!filters.task || episode.task.includes(filters.task)) && (!filters.group || episode.group === filters.group)
    && (!filters.id || episode.id.includes(filters.id))
    && (!filters.agent || episode.agents.includes(filters.agent)) && (!filters.policy || episode.policies.includes(filters.policy))
    && FLAGS.every(([name]) => !filters[name] || episode[name]);
}

export async function episodesView(parameters) {
  const { run } = parameters;
  const { runs } = await get("runs");
  if (!run) return [el("h1", {}, "Episodes"), el("ul", {}, runs.map((item) => el("li", {}, link(item.key, "episodes", { run: item.key }))))];
  const found = await get("episodes", { run, last: parameters.last });
  const episodes = unpack(found);
  const names = (key) => ["", ...new Set(episodes.flatMap((episode) => episode[key]))].map((name) => [name, name || "any"]);
  const count = el("p", { "aria-live": "polite", id: "count" });
  const body = el("div", {});
  const pages = el("p", {});

  const buttons = () => [...body.querySelectorAll("button"), ...pages.children];

  function draw() {
    const pressed = buttons().findIndex((button) => button.matches(":focus-visible"));
    const filters = place().parameters;
    const sort = filters.sort || (episodes.some((episode) => episode.advantage !== null) ? "-advantage" : "");
    const key = sort.replace("-", ""), sign = sort.startsWith("-") ? -1 : 1;
    const kept = episodes.filter(keeps(filters));
    if (key) {
      kept.sort((one, other) => {
        const [a, b] = [one[key], other[key]];
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * (a < b ? -1 : a > b ? 1 : 0);
      });
    }
    const start = Math.min(Number(filters.start || 0), Math.max(0, kept.length - 1));
    const heads = SHOWN.map(([name, text]) => el("th", { scope: "col", "aria-sort": name === key ? (sign > 0 ? "ascending" : "descending") : "none",
      title: name === "advantage" ? "the largest of a turn in magnitude, which orders the rows" : null },
      el("button", { type: "button", on: { click: () => { remember({ sort: sort === `-${name}` ? name : `-${name}`, start: "" }); draw(); } } },
        text, name === key ? (sign > 0 ? " ▲" : " ▼") : "")));
    body.replaceChildren(table(heads, kept.slice(start, start + PAGE).map((episode) => el("tr", {},
      cell(link(episode.id, "episode", { run, id: episode.id })),
      el("td", { class: "number" }, episode.iteration < 0 ? "" : number(episode.iteration)),
      cell(told(episode.task)),
      cell(link(episode.group, "episodes", { run, group: episode.group })),
      el("td", { class: "number", title: episode.agents.map((agent, index) => `${agent} ${number(episode.rewards[index])}`).join(", ") }, episode.error ? "" : number(episode.reward)),
      numberCell(episode.signed_advantage),
      numberCell(episode.turns),
      numberCell(episode.tokens),
      ...["prompt", "reply"].map((name) => el("td", { class: "clip", title: episode[name] }, told(episode[name]))),
      el("td", { class: "clip" }, told(episode.policies.join(", "))),
      cell(told(episode.flags || episode.stop))))));
    const among = found.total === String(episodes.length) ? "" : ` of the run's ${found.total}`;
    count.textContent = `${kept.length === episodes.length ? "" : `${kept.length} found among `}${episodes.length}${among} episodes${kept.length > PAGE ? `, ${start + 1} to ${Math.min(start + PAGE, kept.length)} shown` : ""}`;
    const turn = (text, to) => el("button", { type: "button", disabled: to < 0 || to >= kept.length, on: { click: () => { remember({ start: to }); draw(); } } }, text);
    pages.replaceChildren(...(kept.length > PAGE ? [turn("previous", start - PAGE), " ", turn("next", start + PAGE)] : []));
    buttons()[pressed]?.focus();
  }

  const set = (changes) => { remember({ ...changes, start: "" }); draw(); };
  const field = (name, text, type = "text") => {
    const input = el("input", { type, "aria-label": name === "to" || name === "high" ? `${name === "to" ? "iteration" : "reward"} to` : null, step: "any", value: parameters[name] ?? "", name, on: { input: () => set({ [name]: input.value }) } });
    return el("label", {}, text, " ", input);
  };
  const flags = FLAGS.map(([name, text]) => el("label", {}, el("input", { type: "checkbox", name, checked: Boolean(parameters[name]),
    on: { change: (event) => set({ [name]: event.target.checked ? "1" : "" }) } }), text));
  draw();
  return [
    el("h1", {}, "Episodes of ", link(run, "run", { run })),
    filters(
      field("id", "episode"), el("span", { class: "range" }, field("from", "iteration from", "number"), field("to", "to", "number")), field("task", "task"), field("group", "group"),
      el("span", { class: "range" }, field("low", "reward from", "number"), field("high", "to", "number")),
      choice("agent", names("agents"), parameters.agent ?? "", (agent) => set({ agent })),
      choice("policy", names("policies"), parameters.policy ?? "", (policy) => set({ policy })),
      el("fieldset", {}, el("legend", {}, "only"), flags)),
    found.notes.map((text) => el("p", { class: "warning" }, told(text))),
    found.older === null ? null : el("p", {}, link(`older episodes, from iteration ${found.older} back`, "episodes", { run, last: found.older })),
    count, body, pages,
  ];
}

// The episodes of a group side by side: the common prefix grey, the first token that differs marked.
import { choice, counted, el, filters, get, go, link, number, told } from "./dom.js";
import { unpack } from "./episodes.js";

const BESIDE = 4;

// Return the number of tokens that all sequences begin with.
export function commonPrefix(sequences) {
  const shortest = Math.min(...sequences.map((ids) => ids.length));
  let length = 0;
  while (length < shortest && sequences.every((ids) => ids[length] === sequences[0][length])) length += 1;
  return length;
}

const piece = (row, start, stop) => (row.tokens ?? row.token_ids.map((id) => `${id} `)).slice(start, stop).join("");

export async function groupView({ run, group, iteration, agent, start }) {
  const siblings = unpack(await get("episodes", { run, first: iteration, last: iteration })).filter((episode) => episode.group === group && (iteration === undefined || String(episode.iteration) === iteration))
    .sort((one, other) => other.reward - one.reward);
  if (!siblings.length) return [el("h1", {}, "Group ", told(group), " of ", link(run, "run", { run })), el("p", { class: "warning" }, iteration === undefined ? "The group is not among the newest episodes." : `Iteration ${iteration} has no such group.`)];
  const rewards = siblings.filter((one) => !one.error).map((one) => one.reward);
  const first = Math.min(Number(start ?? 0), siblings.length - 1);
  const records = await Promise.all(siblings.slice(first, first + BESIDE).map((episode) => get("episode", { run, id: episode.id })));
  const agents = [...new Set(records.flatMap((record) => Object.keys(record.trajectories)))];
  const own = agents.includes(agent) ? agent : agents[0];
  const rows = records.map((record) => record.trajectories[own]?.[0]);
  const present = rows.filter((row) => row?.token_ids.length);
  const common = present.length > 1 ? commonPrefix(present.map((row) => row.token_ids)) : 0;
  const move = (text, to) => el("button", { type: "button", disabled: to < 0 || to >= siblings.length, on: { click: () => go({ start: to }) } }, text);
  return [
    el("h1", {}, "Group ", told(group), " of ", link(run, "run", { run })),
    el("p", {}, "Compared are the episodes with the key ", el("code", {}, told(`${siblings[0].iteration < 0 ? "" : `iteration ${siblings[0].iteration}, `}group ${group}`)), ", task ", told(siblings[0].task),
      `: ${counted(siblings.length, "episode")}, ${rewards.length ? `rewards ${number(rewards.at(-1))} to ${number(rewards[0])}` : "all failed"}${siblings[0].flat ? ", no variance" : ""}.`),
    filters(choice("agent", agents.map((name) => [name, name]), own, (value) => go({ agent: value })),
      siblings.length > BESIDE ? [move("previous", first - BESIDE), `${first + 1} to ${Math.min(first + BESIDE, siblings.length)}`, move("next", first + BESIDE)] : null),
    el("p", { class: "note" }, `Grey: the first ${common} tokens, which all of them share. Marked: the first token that differs.`),
    el("div", { class: "beside" }, records.map((record, index) => el("section", {},
      el("h2", {}, link(record.id, "episode", { run, id: record.id })),
      el("p", {}, record.error ? "failed" : `reward ${number(record.reward)}`, siblings[first + index].advantage === null ? "" : `, advantage ${number(siblings[first + index].signed_advantage)}`),
      rows[index]?.token_ids.length
        ? el("div", { class: "text" }, el("span", { class: "given" }, piece(rows[index], 0, common)), el("mark", {}, piece(rows[index], common, common + 1)), piece(rows[index], common + 1))
        : el("p", {}, "no tokens")))),
  ];
}

// The tokens of a trajectory as a heat map; only the lines in sight are in the page.
import { choice, el, filters, get, go, link, number, visible } from "./dom.js";

const LINE = 22, CHARACTER = 8.2, AROUND = 3;
const SIGNED = ["advantage", "return", "baseline", "reward"];
const OF_TURN = [...SIGNED, "version"];

// Return the index of each token's turn; -1 for a token that was not sampled.
export function turnOfTokens(row) {
  const found = new Int32Array(row.token_ids.length).fill(-1);
  row.turns.forEach((turn, index) => found.fill(index, turn.start, turn.stop));
  return found;
}

// Return the values of each measure that the record holds, one per token; null where there is none.
export function measures(row) {
  const turns = turnOfTokens(row), found = {};
  for (const name of row.per_token) {
    const values = row[name];
    if (name === "action_mask") found.mask = values.map((value) => (value ? 1 : 0));
    else found[name] = values.map((value, index) => (turns[index] < 0 ? null : value));
  }
  for (const name of OF_TURN) {
    if (row.turns.some((turn) => typeof turn[name] === "number")) {
      found[name] = Array.from(turns, (turn) => (turn < 0 ? null : row.turns[turn][name] ?? null));
    }
  }
  return found;
}

const shown = (row, index) => visible(row.tokens ? row.tokens[index] : `${row.token_ids[index]} `).replaceAll("\t", "⇥");
// Letters of two columns: Chinese, Japanese and Korean ones, and pictures.
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/gu;
const columns = (text) => text.replaceAll(WIDE, "..").length;

// Return [start, stop] of each line: a line ends at its width, after a line break, and where a turn begins or ends.
export function layout(row, width) {
  const turns = turnOfTokens(row), lines = [];
  let start = 0, used = 0;
  for (let index = 0; index < row.token_ids.length; index += 1) {
    const text = shown(row, index), length = Math.min(columns(text), width);
    const border = index > start && turns[index] !== turns[index - 1];
    if (index > start && (used + length > width || border)) {
      lines.push([start, index]);
      [start, used] = [index, 0];
    }
    used += length;
    if (text.includes("\n")) {
      lines.push([start, index + 1]);
      [start, used] = [index + 1, 0];
    }
  }
  if (start < row.token_ids.length) lines.push([start, row.token_ids.length]);
  return lines;
}

// Return the color of each value of a measure between two bounds: with a sign red below zero, blue above, and as deep as it is far from zero.
export function scale(name, low, high) {
  if (low < 0 || SIGNED.includes(name)) {
    const most = Math.max(-low, high) || 1;
    return (value) => (value === null ? "" : `hsl(${value < 0 ? 5 : 215} 75% 50% / ${0.08 + 0.6 * Math.abs(value) / most})`);
  }
  return (value) => (value === null ? "" : `hsl(28 85% 50% / ${0.08 + 0.52 * (high === low ? 0 : (value - low) / (high - low))})`);
}

export async function tokensView({ run, id, agent, row: part, by }) {
  const record = await get("episode", { run, id });
  const all = Object.values(record.trajectories).flat().filter((row) => row.token_ids.length);
  if (!all.length) return [el("h1", {}, "Tokens of ", link(id, "episode", { run, id })), el("p", {}, "The record holds no tokens.")];
  const own = all.filter((row) => row.agent === (agent ?? all[0].agent));
  const row = own[Number(part ?? 0)] ?? own[0] ?? all[0];
  const values = measures(row), names = Object.keys(values);
  const name = names.includes(by) ? by : names.includes("advantage") ? "advantage" : names.includes("logprobs") ? "logprobs" : names[0];
  const present = values[name].filter((value) => value !== null);
  const low = present.reduce((one, other) => Math.min(one, other), Infinity), high = present.reduce((one, other) => Math.max(one, other), -Infinity);
  const shade = scale(name, low, high);
  const swatch = (value) => {
    const box = el("span", { class: "swatch" });
    box.style.background = shade(value);
    return box;
  };
  const turns = turnOfTokens(row);
  const facts = el("p", { class: "readout", "aria-live": "polite" }, "Point at a token, or move with the arrow keys.");
  const space = el("div", { class: "space" });
  const scroller = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "tokens" }, space);
  const inSight = new Map();
  let lines = [], chosen = -1;

  function choose(index) {
    chosen = Math.max(0, Math.min(row.token_ids.length - 1, index));
    const turn = row.turns[turns[chosen]];
    facts.replaceChildren(visible(`token ${chosen}, id ${row.token_ids[chosen]}, ${JSON.stringify(row.tokens?.[chosen] ?? "")}: `
      + `${names.filter((key) => values[key][chosen] !== null).map((key) => `${key} ${number(values[key][chosen])}`).join(", ")}`
      + `${turn ? `; turn ${turn.index} of ${turn.policy}` : "; not sampled"}`));
    space.querySelector(".chosen")?.classList.remove("chosen");
    space.querySelector(`[data-index="${chosen}"]`)?.classList.add("chosen");
  }

  function drawn(number) {
    const [start, stop] = lines[number];
    const line = el("div", { class: "line" }, Array.from({ length: stop - start }, (_, shift) => {
      const index = start + shift;
      const token = el("span", { class: `${turns[index] < 0 ? "given" : ""}${index === chosen ? " chosen" : ""}` }, shown(row, index).replaceAll("\n", "⏎"));
      token.style.background = shade(values[name][index]);
      token.dataset.index = index;
      return token;
    }));
    line.style.top = `${number * LINE}px`;
    return line;
  }

  function paint() {
    const first = Math.max(0, Math.floor(scroller.scrollTop / LINE) - AROUND);
    const last = Math.min(lines.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / LINE) + AROUND);
    for (const [number, line] of inSight) {
      if (number < first || number >= last) {
        line.remove();
        inSight.delete(number);
      }
    }
    for (let number = first; number < last; number += 1) {
      if (!inSight.has(number)) {
        inSight.set(number, drawn(number));
        space.append(inSight.get(number));
      }
    }
  }

  function arrange() {
    lines = layout(row, Math.max(20, Math.floor((scroller.clientWidth - 20) / CHARACTER)));
    space.style.height = `${lines.length * LINE}px`;
    space.replaceChildren();
    inSight.clear();
    paint();
  }

  scroller.addEventListener("scroll", paint);
  scroller.addEventListener("pointerover", (event) => { if (event.target.dataset.index) choose(Number(event.target.dataset.index)); });
  scroller.addEventListener("keydown", (event) => {
    const line = lines.findIndex(([start, stop]) => chosen >= start && chosen < stop);
    const to = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, ArrowUp: lines[line - 1]?.[0], ArrowDown: lines[line + 1]?.[0] ?? (line < 0 ? 0 : undefined) }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const at = lines.findIndex(([start, stop]) => to >= start && to < stop);
    if (at * LINE < scroller.scrollTop || (at + 1) * LINE > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = at * LINE - scroller.clientHeight / 2;
    choose(to);
  });
  new ResizeObserver(arrange).observe(scroller);
  const agents = [...new Set(all.map((item) => item.agent))].map((item) => [item, item]);
  return [
    el("h1", {}, "Tokens of ", link(id, "episode", { run, id })),
    filters(
      choice("agent", agents, row.agent, (value) => go({ agent: value, row: "" })),
      own.length > 1 ? choice("trajectory", own.map((_, index) => [String(index), `${index + 1} of ${own.length}`]), String(own.indexOf(row)), (value) => go({ row: value })) : null,
      choice("color by", names.map((item) => [item, item]), name, (value) => go({ by: value }))),
    own.length > 1 ? el("p", { class: "warning" }, "The chat template rewrote history, so that this agent has several trajectories.") : null,
    row.tokens ? null : el("p", { class: "note" }, "The run holds no tokenizer yet: tokens are shown by their ids."),
    el("p", { class: "note" }, present.length ? [`${name} from `, swatch(low), `${number(low)} to `, swatch(high), `${number(high)}; ${row.token_ids.length} tokens, grey ones were not sampled.`] : ""),
    facts, scroller,
  ];
}

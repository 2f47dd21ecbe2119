// What each worker did, moment by moment; and all workers at once, a square for each.

import { clock } from "./charts.js";
import { $, colour, tip } from "./dom.js";

export const KINDS = ["compute", "pull", "push", "wait"];
export const STATES = ["busy", "waiting", "idle", "leaving"];
const LABEL = 78, AXIS = 18, SQUARE = 15, MANY = 16;

const shadeOf = (state) => (STATES.includes(state) ? state : "gone");

function prepared(canvas, height) {
  const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

/** What a cell says: its state, and the shares that are known. */
export function cellText([state, ...shares]) {
  const parts = KINDS.map((kind, at) => `${kind} ${shares[at]} %`);
  return shares[0] < 0 ? state : `${state}: ${parts.join(", ")}`;
}

/** Height of a lane, and of the gap below it. */
const laneOf = (count) => (count > MANY ? [10, 2] : [16, 4]);

/** Return draw(names, times, rows): rows are cells or null, as the server sends them. */
export function lanes(id) {
  const canvas = $(id);
  let shown = null;
  tip(canvas, (x, y) => {
    const row = shown && Math.floor(y / shown.pitch);
    const at = shown && Math.floor((x - LABEL) / shown.step);
    const cell = shown?.rows[row]?.[at];
    if (x < LABEL || !cell) return null;
    return `${shown.names[row]}, ${clock(shown.times[at])}: ${cellText(cell)}`;
  });
  return (names, times, rows) => {
    const [high, gap] = laneOf(names.length), pitch = high + gap;
    const [context, width] = prepared(canvas, names.length * pitch + AXIS);
    const step = (width - LABEL) / Math.max(times.length, 30);
    shown = { names, times, rows, step, pitch };
    const shades = Object.fromEntries([...KINDS, ...STATES, "gone", "free", "quiet", "text"].map((name) => [name, colour(name)]));
    rows.forEach((row, line) => {
      const top = line * pitch;
      context.fillStyle = shades.text;
      context.fillText(names[line], 0, top + high / 2, LABEL - 8);
      row.forEach((cell, at) => {
        if (!cell) return;
        const [state, ...shares] = cell, left = LABEL + at * step, wide = Math.max(step - 0.5, 0.5);
        const known = shares[0] >= 0 && STATES.includes(state);
        context.fillStyle = known ? shades.free : shades[shadeOf(state)];
        context.globalAlpha = known || shadeOf(state) === "gone" ? 1 : 0.4;  // a state, not a share
        context.fillRect(left, top, wide, high);
        context.globalAlpha = 1;
        let bottom = top + high;
        if (known) KINDS.forEach((kind, number) => {
          const part = Math.min((high * shares[number]) / 100, bottom - top);
          context.fillStyle = shades[kind];
          context.fillRect(left, bottom - part, wide, part);
          bottom -= part;
        });
      });
    });
    context.fillStyle = shades.quiet;
    const axis = names.length * pitch + AXIS / 2;
    for (let at = 0; at < times.length; at += 15) {
      const left = LABEL + at * step;
      if (left < width - 60) context.fillText(clock(times[at]), left, axis);
    }
  };
}

/** Return draw(states): [name, state, slowness] of each worker. */
export function squares(id) {
  const canvas = $(id);
  let shown = [], across = 1;
  tip(canvas, (x, y) => {
    const column = Math.floor(x / SQUARE);
    const one = column < across ? shown[Math.floor(y / SQUARE) * across + column] : undefined;
    return one ? `${one[0]}: ${one[1]}` : null;
  });
  return (states) => {
    shown = states;
    across = Math.max(1, Math.floor(canvas.clientWidth / SQUARE));
    const [context] = prepared(canvas, Math.ceil(states.length / across) * SQUARE);
    states.forEach(([, state, slowness], at) => {
      context.globalAlpha = state === "busy" ? 0.35 + 0.65 * slowness : 1;
      context.fillStyle = colour(shadeOf(state));
      context.fillRect((at % across) * SQUARE, Math.floor(at / across) * SQUARE, SQUARE - 2, SQUARE - 2);
    });
  };
}

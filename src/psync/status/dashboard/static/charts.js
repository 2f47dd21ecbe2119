// Charts of series over time, with uPlot. A chart is made anew when its series or the colours change.

import { $, colour } from "./dom.js";

const UNITS = ["", "k", "M", "G", "T"];
const HEIGHT = 180;
const DAY_S = 12 * 3600;  // ticks that are farther apart may be of two days
const DOUBLINGS = Array.from({ length: 44 }, (_, power) => 2 ** power);  // ticks of bytes

function scaled(value, base, units) {
  let step = 0;
  while (Math.abs(value) >= base && step < units.length - 1) { value /= base; step += 1; }
  return `${Number(value.toPrecision(3))}${units[step]}`;
}
export const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour12: false });
/** Times of an axis: with the day where there are several. */
const clocks = (times) => times.map(times.at(-1) - times[0] < DAY_S ? clock : (time) => new Date(time * 1000).toLocaleString(
  [], { month: "numeric", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false }));
export const number = (value) => (value == null ? "–" : scaled(value, 1000, UNITS));
export const bytes = (value) =>
  (value == null ? "–" : `${scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"])}/s`);
export const percent = (value) => (value == null ? "–" : `${Math.round(value)} %`);

/** Sums from the first series on: what a stack of areas draws. */
export function stacked(lines) {
  let below = lines[0].map(() => 0);
  return lines.map((line) => (below = line.map((value, at) => (value == null ? null : value + below[at]))));
}

/**
 * Return update(times, series, options): series are {label, shade, values, scale}, of scale "y" or, on
 * the right, "right"; a stack is one of areas, top is where its scale ends.
 */
export function chart(id) {
  const place = $(id);
  let plot = null;
  let made = "";
  let raw = [];
  const options = (series, { format = number, stack = false, top = null }) => {
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const lines = series.map(({ label, shade, scale = "y" }, at) => ({
      label, scale, stroke: colour(shade), width: stack ? 0 : 1.6, points: { show: false }, spanGaps: false,
      fill: stack ? colour(shade) : undefined,
      value: (_, __, number_, index) => format(index == null ? raw[at]?.at(-1) : raw[at]?.[index]),
    }));
    const range = (_, low, high) => [Math.min(0, low ?? 0), top ?? (high || 1) * 1.08];
    const right = { ...axis, scale: "right", side: 1, size: 46, grid: { show: false }, values: (_, ticks) => ticks.map(format) };
    return {
      width: place.clientWidth, height: HEIGHT,
      padding: [8, series.some(({ scale }) => scale === "right") ? 0 : 30, 0, 0],
      cursor: { y: false, sync: { key: "run" }, points: { show: !stack }, drag: { x: false, y: false } },
      legend: { live: true },
      scales: { y: { range }, right: { range } },
      axes: [{ ...axis, size: 30, space: 90, values: (_, ticks) => clocks(ticks) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(format), ...(format === bytes ? { incrs: DOUBLINGS } : {}) },
        ...(series.some(({ scale }) => scale === "right") ? [right] : [])],
      series: [{ value: (_, time) => (time == null ? "now" : clock(time)) }, ...(stack ? lines.reverse() : lines)],
    };
  };
  new ResizeObserver(() => plot?.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
  return (times, series, how = {}) => {
    place.hidden = series.length === 0;
    if (place.hidden) return;
    raw = series.map((one) => one.values);
    const drawn = how.stack ? stacked(raw).reverse() : raw;
    const shape = JSON.stringify([series.map(({ label, shade }) => [label, colour(shade)]), how.top]);
    if (shape !== made) {
      plot?.destroy();
      plot = new uPlot(options(series, how), [times, ...drawn], place);
      made = shape;
    } else {
      plot.setData([times, ...drawn]);
    }
  };
}

// Elements, and what is drawn with them: tables, bars, legends. Texts come from the server as they are.

export const $ = (id) => document.getElementById(id);

/** Return an element; children are elements or texts, never markup. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name === "title") made.title = value;
    else Object.assign(made.style, { [name]: value });
  }
  made.append(...children);
  return made;
}

export const put = (id, ...children) => $(id).replaceChildren(...children);

/** The value of a custom property: colours stand in the style sheet only. */
export const colour = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Columns: [key of the row, heading, class]. A column is left out where no row has a value. */
export function table(id, columns, rows) {
  const shown = columns.filter(([key]) => rows.some((row) => row[key]));
  const head = el("tr", {}, ...shown.map(([, title, kind]) => el("th", { class: kind ?? "" }, title)));
  const body = rows.map((row) => el("tr", {}, ...shown.map(([key, , kind]) => {
    const text = row[key] ?? "";
    const state = key === "state" ? ` dot ${text.replaceAll(" ", "-")}` : "";
    return el("td", { class: (kind ?? "") + state, title: kind?.includes("long") ? text : "" }, text);
  })));
  $(id).className = "rows";
  put(id, el("thead", {}, head), el("tbody", {}, ...body));
}

export function legend(id, entries) {
  put(id, ...entries.map(([name, shade]) => el("li", {}, el("i", { background: colour(shade) }), name)));
}

export function histogram(id, bars) {
  put(id, ...bars.map((bar) => el("div", { title: `${bar.count} pushes, ${bar.share}` },
    bar.share, el("i", { height: `${bar.height * 0.75}%` }), el("b", {}, bar.label))));
}

export function placement(id, servers) {
  put(id, ...servers.map((ps) => el("div", { class: "placed" }, ps.task,
    el("div", { class: "strip" }, ...ps.parts.map((part) => el("span", {
      title: part.text, width: `${part.width}%`,
      background: part.colour < 0 ? colour("quiet") : colour(`c${part.colour % 12}`),
    }, part.width > 12 ? part.name : ""))),
    el("small", {}, ps.total))));
}

/** A text beside the pointer; textAt returns it for a place in the element, or null. */
export function tip(element, textAt) {
  const box = el("div", { class: "tip" });
  box.hidden = true;
  document.body.append(box);
  element.addEventListener("pointerleave", () => { box.hidden = true; });
  element.addEventListener("pointermove", (event) => {
    const text = textAt(event.offsetX, event.offsetY);
    box.hidden = text === null;
    if (text === null) return;
    box.textContent = text;
    const left = Math.min(event.pageX + 14, innerWidth - box.offsetWidth - 8);
    Object.assign(box.style, { left: `${left}px`, top: `${event.pageY + 14}px` });
  });
}


function nice(most) {
  if (most <= 4) return most <= 1 ? 1 : 4;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10].map((n) => n * power).find((n) => n >= most);
}

const binary = (most) => 2 ** Math.ceil(Math.log2(Math.max(1024, most)));

/* One line over the last hour, with a scale of its own. `values` are as long as `times`, null for a gap. */
class Chart {
  constructor() {
    this.box = make("figure");
    this.title = make("strong");
    this.text = make("span", "", "hint");
    const caption = make("figcaption");
    caption.append(this.title, this.text);
    this.plot = make("div", undefined, "chart");
    this.tip = make("div", "", "tip");
    this.tip.hidden = true;
    this.box.append(caption, this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event.clientX));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.paint()).observe(this.plot);
  }

  show({ title, href, times, values, format, top = nice, level = "" }) {
    const wanted = JSON.stringify([title, times.length, times[times.length - 1], values, level]);
    if (this.shown === wanted) return;
    this.shown = wanted;
    Object.assign(this, { times, values, format, top });
    if (this.title.textContent !== title) {
      this.title.replaceChildren(href ? Object.assign(make("a", title), { href }) : document.createTextNode(title));
    }
    this.box.dataset.level = level;
    const known = values.filter((value) => value !== null);
    put(this.text, known.length ? `Now ${format(known[known.length - 1])}, at most ${format(Math.max(...known))}` : "Nothing measured yet");
    this.paint();
  }

  paint() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight, { times, values } = this;
    if (!width || !times) return;
    const left = 52, right = width - 4, top = 8, bottom = height - 20;
    const known = values.filter((value) => value !== null);
    const end = times.length ? times[times.length - 1] : Date.now();
    const most = this.top(Math.max(0, ...known));
    const length = times.length ? Math.min(HOUR, Math.max(5 * MINUTE, end - times[0])) : HOUR;
    this.x = (time) => right - (end - time) / length * (right - left);
    const y = (value) => bottom - value / most * (bottom - top);
    const svg = draw("svg", { role: "img", "aria-label": `${this.title.textContent}: ${this.text.textContent}`, viewBox: `0 0 ${width} ${height}` });
    for (const part of [0, 0.5, 1]) {
      svg.append(draw("line", { class: "grid", x1: left, x2: right, y1: y(most * part), y2: y(most * part) }));
      const text = draw("text", { x: left - 7, y: y(most * part) + 4, "text-anchor": "end" });
      text.textContent = part && most * part < 1 ? "" : this.format(most * part, true);
      svg.append(text);
    }
    for (const part of width > 300 ? [1, 0.5, 0] : [1, 0]) {
      const text = draw("text", { x: this.x(end - part * length), y: height - 3, "text-anchor": part === 1 ? "start" : part ? "middle" : "end" });
      text.textContent = clock.format(end - part * length);
      svg.append(text);
    }
    let line = "", area = "", from = null, before = null;
    const close = () => { if (from !== null) area += `L${before} ${bottom}L${from} ${bottom}Z`; from = null; };
    values.forEach((value, at) => {
      if (value === null) { close(); return; }
      const x = this.x(times[at]).toFixed(1), place = `${x} ${y(value).toFixed(1)}`;
      line += `${from === null ? "M" : "L"}${place}`;
      area += `${from === null ? "M" : "L"}${place}`;
      if (from === null) from = x;
      before = x;
    });
    close();
    svg.append(draw("path", { class: "area", d: area }), draw("path", { class: "line", d: line }));
    if (known.length === 1) {
      const at = values.findIndex((value) => value !== null);
      svg.append(draw("circle", { class: "dot", r: 3, cx: this.x(times[at]), cy: y(values[at]) }));
    }
    this.mark = draw("line", { class: "mark", y1: top, y2: bottom, visibility: "hidden" });
    svg.append(this.mark);
    this.plot.replaceChildren(svg, this.tip);
  }

  point(clientX) {
    const at = this.times && clientX !== null ? this.nearest(clientX - this.plot.getBoundingClientRect().left) : -1;
    this.tip.hidden = at < 0;
    if (this.mark) this.mark.setAttribute("visibility", at < 0 ? "hidden" : "visible");
    if (at < 0) return;
    const x = this.x(this.times[at]);
    this.mark.setAttribute("x1", x);
    this.mark.setAttribute("x2", x);
    put(this.tip, `${clock.format(this.times[at])}  ${this.format(this.values[at])}`);
    this.tip.style.left = `${Math.min(Math.max(0, x + 8), Math.max(0, this.plot.clientWidth - this.tip.offsetWidth))}px`;
  }

  nearest(x) {
    let best = -1;
    this.times.forEach((time, n) => {
      if (this.values[n] !== null && (best < 0 || Math.abs(this.x(time) - x) < Math.abs(this.x(this.times[best]) - x))) best = n;
    });
    return best;
  }
}

/* Charts side by side, each with its own scale; kept by key. */
class Multiples {
  constructor(id) {
    this.box = $(id);
    this.charts = new Map();
  }

  show(items) {
    const kept = new Set(items.map(({ key }) => key));
    for (const [key, chart] of this.charts) if (!kept.has(key)) { chart.box.remove(); this.charts.delete(key); }
    items.forEach((item, place) => {
      let chart = this.charts.get(item.key);
      if (!chart) this.charts.set(item.key, chart = new Chart());
      if (this.box.children[place] !== chart.box) this.box.insertBefore(chart.box, this.box.children[place] || null);
      chart.show(item);
    });
  }
}

const asCount = (value, axis) => axis ? brief.format(value) : whole.format(value);
const asRate = (value, axis) => axis ? brief.format(value) : `${rate(value)}/s`;
const asSize = (value, axis) => axis ? value ? size(value).replace(/\.0 /, " ") : "0" : size(value);

// Charts: SVG lines from /api/history, values on hover and by the arrow keys, and the same data as a table.
// No text becomes markup: elements are created one by one, with textContent.
"use strict";
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 150, LEFT = 48, RIGHT = 10, TOP = 10, BOTTOM = 20;

  function element(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.appendChild(made);
    return made;
  }

  function html(name, parent, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    if (parent) parent.appendChild(made);
    return made;
  }

  const units = {
    count: (value) => (value >= 1e9 ? (value / 1e9).toFixed(1) + "G" : value >= 1e6 ? (value / 1e6).toFixed(1) + "M" : value >= 1e4 ? (value / 1e3).toFixed(0) + "k" : trim(value)),
    rate: (value) => units.count(value) + "/s",
    share: (value) => (value * 100).toFixed(value < 0.1 ? 1 : 0) + "%",
    seconds: (value) => (value >= 1 ? trim(value) + " s" : value >= 1e-3 ? trim(value * 1e3) + " ms" : (value * 1e6).toFixed(0) + " µs"),
  };

  function trim(value) {
    return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value >= 1 ? value.toFixed(1) : value.toFixed(2);
  }

  function shown(value, unit) {
    return value === null || value === undefined ? "–" : (units[unit] || units.count)(value);
  }

  function clock(seconds, step) {
    const when = new Date(seconds * 1000);
    const time = when.toLocaleTimeString([], step < 60 ? { hour: "2-digit", minute: "2-digit", second: "2-digit" } : { hour: "2-digit", minute: "2-digit" });
    return step >= 3600 ? when.toLocaleDateString([], { month: "short", day: "numeric" }) + " " + time : time;
  }

  // The next round number, so that the axis has even steps.
  function ceiling(value) {
    if (!(value > 0)) return 1;
    const power = Math.pow(10, Math.floor(Math.log10(value)));
    for (const factor of [1, 2, 3, 4, 6, 8]) if (factor * power >= value) return factor * power;
    return 10 * power;
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.plot = figure.querySelector("[data-plot]");
      this.legend = figure.querySelector("[data-legend]");
      this.table = figure.querySelector("[data-table]");
      this.details = figure.querySelector("details");
      this.names = figure.dataset.figures.split(",");
      this.labels = figure.dataset.labels.split(",");
      this.unit = figure.dataset.unit;
      this.title = figure.querySelector("figcaption").textContent;
      this.tag = "";
      this.data = null;
      this.chosen = -1;
      this.details.addEventListener("toggle", () => this.fillTable());
      this.width = 0;
      new ResizeObserver(() => {
        if (this.data && this.plot.clientWidth !== this.width) this.draw();
      }).observe(this.plot);
    }

    async load(range, signal) {
      const source = this.figure.dataset.src;
      if (!source) return;
      const url = source + "?range=" + encodeURIComponent(range);
      const headers = this.url === url && this.tag ? { "If-None-Match": this.tag } : {};
      const answer = await fetch(url, { headers, cache: "no-store", credentials: "same-origin", signal });
      if (answer.status === 304) return;
      if (answer.status === 401) throw new Error("you are no longer logged in");
      if (!answer.ok) throw new Error("status " + answer.status);
      this.tag = answer.headers.get("ETag") || "";
      this.url = url;
      this.show(await answer.json());
    }

    show(data) {
      // Keep the selected time.
      const time = this.data?.times[this.chosen];
      this.chosen = data.times.indexOf(time);
      this.data = data;
      this.series = this.names.map((name) => data.values[name] || []);
      this.draw();
      this.fillTable();
    }

    draw() {
      const { times, step } = this.data;
      const known = this.series.some((values) => values.some((value) => value !== null));
      const chosen = this.chosen, hadFocus = this.plot.contains(document.activeElement);
      this.plot.replaceChildren();
      this.figure.dataset.drawn = known ? "yes" : "empty";
      if (!known || !times.length) {
        html("p", this.plot, "No data yet.", "muted");
        this.describe(-1);
        return;
      }
      const first = times[0], last = Math.max(times[times.length - 1], first + step);
      const highest = Math.max(...this.series.flat().filter((value) => value !== null));
      // Counts have no halves on the axis.
      const most = this.unit === "count" ? Math.max(2, ceiling(highest)) : ceiling(highest);
      // Screen pixels, so that text has its usual size.
      const width = (this.width = this.plot.clientWidth) || 480;
      this.x = (time) => LEFT + ((time - first) / (last - first)) * (width - LEFT - RIGHT);
      this.y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
      const root = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": this.summary() }, this.plot);
      for (const part of [0, 0.5, 1]) {
        const height = this.y(part * most);
        element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }, root);
        element("text", { class: "axis", x: LEFT - 6, y: height + 4, "text-anchor": "end" }, root, shown(part * most, this.unit));
      }
      element("text", { class: "axis", x: LEFT, y: HEIGHT - 4 }, root, clock(first, step));
      if (width > 320) element("text", { class: "axis", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, root, clock((first + last) / 2, step));
      element("text", { class: "axis", x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, root, clock(last, step));
      this.series.forEach((values, number) => this.line(root, times, values, number, step));
      this.cursor = element("g", { visibility: "hidden" }, root);
      root.addEventListener("pointermove", (event) => this.point(this.nearest(event, root)));
      root.addEventListener("pointerleave", () => this.point(-1));
      root.addEventListener("blur", () => this.point(-1));
      root.addEventListener("keydown", (event) => this.key(event));
      if (hadFocus) root.focus({ preventScroll: true });
      this.point(chosen < times.length ? chosen : -1);
    }

    // The line has a gap where a value is unknown or missing.
    line(root, times, values, number, step) {
      let path = "", alone = null, previous = null, piece = "", began = 0;
      const floor = HEIGHT - BOTTOM;
      // The area below the first line is shaded.
      const close = () => {
        if (!number && piece && previous !== began) element("path", { class: "shade", d: `${piece}L${this.x(times[previous]).toFixed(1)} ${floor}L${this.x(times[began]).toFixed(1)} ${floor}Z` }, root);
        piece = "";
      };
      const dot = (place) => element("circle", { class: "dot d" + number, cx: this.x(times[place]), cy: this.y(values[place]), r: 1.8 }, root);
      for (let place = 0; place < times.length; place++) {
        if (values[place] === null) {
          if (previous !== null) close();
          previous = null;
          continue;
        }
        const joins = previous !== null && times[place] - times[previous] <= Math.max(6 * step, 60);
        if (!joins && alone !== null) dot(alone);
        alone = joins ? null : place;
        if (!joins) {
          if (previous !== null) close();
          began = place;
        }
        const next = (joins ? "L" : "M") + this.x(times[place]).toFixed(1) + " " + this.y(values[place]).toFixed(1);
        path += next;
        piece += next;
        previous = place;
      }
      if (alone !== null) dot(alone);
      if (previous !== null) close();
      if (path) element("path", { class: "line s" + number, d: path }, root);
    }

    nearest(event, root) {
      const box = root.getBoundingClientRect();
      const wanted = ((event.clientX - box.left) / box.width) * (this.width || 480);
      let best = -1, distance = Infinity;
      this.data.times.forEach((time, place) => {
        const away = Math.abs(this.x(time) - wanted);
        if (away < distance) [best, distance] = [place, away];
      });
      return best;
    }

    key(event) {
      const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      if (!(event.key in steps)) return;
      event.preventDefault();
      const end = this.data.times.length - 1;
      const from = this.chosen < 0 ? end + 1 : this.chosen;
      this.point(Math.max(0, Math.min(end, from + steps[event.key])));
    }

    point(place) {
      this.chosen = place;
      this.cursor.replaceChildren();
      this.cursor.setAttribute("visibility", place < 0 ? "hidden" : "visible");
      if (place >= 0) {
        const across = this.x(this.data.times[place]);
        element("line", { class: "cursor", x1: across, x2: across, y1: TOP, y2: HEIGHT - BOTTOM }, this.cursor);
        this.series.forEach((values, number) => {
          if (values[place] !== null && values[place] !== undefined) element("circle", { class: "dot d" + number, cx: across, cy: this.y(values[place]), r: 3 }, this.cursor);
        });
      }
      this.describe(place);
      const root = this.plot.querySelector("svg");
      if (root) root.setAttribute("aria-label", place < 0 ? this.summary() : this.at(place));
    }

    describe(place) {
      this.legend.replaceChildren();
      const at = place < 0 ? this.data.times.length - 1 : place;
      this.labels.forEach((label, number) => {
        const value = at < 0 ? null : this.series[number][at];
        html("span", this.legend, "● " + label + " " + shown(value, this.unit), "k" + number);
      });
      if (place >= 0) html("span", this.legend, clock(this.data.times[place], this.data.step), "muted");
    }

    at(place) {
      const values = this.labels.map((label, number) => label + " " + shown(this.series[number][place], this.unit));
      return clock(this.data.times[place], this.data.step) + ": " + values.join(", ");
    }

    summary() {
      return this.title + ". Now " + this.at(this.data.times.length - 1) + ". Arrow keys show other times.";
    }

    fillTable() {
      if (!this.details.open || !this.data) return;
      const table = document.createElement("table");
      const head = html("tr", html("thead", table));
      html("th", head, "Time").scope = "col";
      for (const label of this.labels) html("th", head, label).scope = "col";
      const body = html("tbody", table);
      for (let place = this.data.times.length - 1; place >= 0; place--) {
        const row = html("tr", body);
        html("th", row, clock(this.data.times[place], this.data.step)).scope = "row";
        for (const values of this.series) html("td", row, shown(values[place], this.unit));
      }
      this.table.replaceChildren(table);
    }
  }

  window.NsqCharts = { Chart, html };
})();

// Charts: SVG lines from /api/history. All charts of a page share a cursor and a zoom. Values on hover and by
// the arrow keys, and the same data as a table. No text becomes markup: elements are created one by one.
"use strict";
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 170, LEFT = 56, RIGHT = 12, TOP = 10, BOTTOM = 22;
  const LEAST_DRAG = 8;
  const Times = window.NsqTimes;

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

  const large = [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]];
  const lengths = [[2 * 86400, 86400, " d"], [2 * 3600, 3600, " h"], [120, 60, " min"], [1, 1, " s"], [1e-3, 1e-3, " ms"], [0, 1e-6, " µs"]];
  const units = {
    count: (value) => {
      const found = large.find(([least]) => Math.abs(value) >= least);
      return found ? trim(value / found[1]) + found[2] : trim(value);
    },
    rate: (value) => units.count(value) + "/s",
    share: (value) => trim(value * 100) + "%",
    seconds: (value) => {
      if (value === 0) return "0 s";
      const [, size, unit] = lengths.find(([least]) => value >= least);
      return trim(value / size) + unit;
    },
  };

  function trim(value) {
    const digits = value === 0 || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
    return Number(value.toFixed(digits)).toLocaleString("en");
  }

  function shown(value, unit) {
    return value === null || value === undefined ? "–" : (units[unit] || units.count)(value);
  }

  // Round numbers from 0 to the highest value, three or four of them.
  function ticksTo(highest, unit) {
    const base = unit === "count" ? Math.max(highest, 2) : highest > 0 ? highest : 1;
    const power = Math.pow(10, Math.floor(Math.log10(base / 4)));
    let step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one * 4 >= base);
    if (unit === "count") step = Math.max(1, Math.ceil(step));
    const found = [0];
    while (found[found.length - 1] < base) found.push(found.length * step);
    return found;
  }

  const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

  // Round times between two others, in the zone that is shown.
  function timesBetween(first, last, most) {
    const step = STEPS.find((one) => (last - first) / one <= most) || 604800 * Math.ceil((last - first) / 604800 / most);
    const shift = Times.offset(last) * 60, found = [];
    for (let at = Math.ceil((first + shift) / step) * step - shift; at <= last; at += step) found.push(at);
    return { found, step };
  }

  function label(seconds, step) {
    const at = Times.parts(seconds);
    return step >= 86400 || (at.isMidnight && step >= 60) ? at.day : step < 60 ? at.full : at.time;
  }

  function exact(seconds, span) {
    const at = Times.parts(seconds);
    return (span > 86400 / 2 ? at.day + " " : "") + (span > 2 * 3600 ? at.time : at.full);
  }

  // What the charts of a page share.
  const shared = {
    charts: [],
    zoom: null,
    onZoom: () => {},
    point(time, from) {
      for (const chart of shared.charts) if (chart.data) chart.pointAt(time, chart === from);
    },
    // Whole seconds, as the address of the page keeps them: whoever opens it sees the same axis.
    setZoom(zoom) {
      shared.zoom = zoom && [Math.floor(zoom[0]), Math.ceil(zoom[1])];
      for (const chart of shared.charts) if (chart.data) chart.draw();
      shared.onZoom(shared.zoom);
    },
  };

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
      this.isDragged = false;
      this.newer = null;
      this.details.addEventListener("toggle", () => this.fillTable());
      this.width = 0;
      shared.charts.push(this);
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
      // A new drawing would end the drag.
      if (this.isDragged) {
        this.newer = data;
        return;
      }
      // Keep the selected time, or the nearest one to it.
      const time = this.times?.[this.chosen];
      this.data = data;
      this.draw();
      this.pointAt(time, false);
      this.fillTable();
    }

    // The part of the data inside the zoom. Outside it, one point on each side, so that lines go to the edge.
    cut() {
      const { times, values } = this.data;
      let first = 0, last = times.length;
      if (shared.zoom) {
        first = Math.max(0, times.findIndex((time) => time >= shared.zoom[0]) - 1);
        const beyond = times.findIndex((time) => time > shared.zoom[1]);
        last = beyond < 0 ? times.length : beyond + 1;
      }
      this.times = times.slice(first, last);
      this.series = this.names.map((name) => (values[name] || []).slice(first, last));
    }

    draw() {
      const step = this.data.step;
      this.cut();
      const times = this.times;
      const known = this.series.some((values) => values.some((value) => value !== null && value !== undefined));
      const chosen = this.chosen, hadFocus = this.plot.contains(document.activeElement);
      this.plot.replaceChildren();
      this.figure.dataset.drawn = known ? "yes" : "empty";
      if (!known || !times.length) {
        html("p", this.plot, shared.zoom ? "No data in this time." : this.figure.dataset.empty || "No data yet. The chart begins with the next polls.", "muted");
        this.describe(-1);
        return;
      }
      const first = shared.zoom ? shared.zoom[0] : times[0];
      const last = shared.zoom ? shared.zoom[1] : Math.max(times[times.length - 1], first + step);
      this.span = last - first;
      const highest = Math.max(0, ...this.series.flat().filter((value) => value !== null));
      const marks = ticksTo(highest, this.unit), most = marks[marks.length - 1];
      // Screen pixels, so that text has its usual size.
      const width = (this.width = this.plot.clientWidth) || 480;
      this.x = (time) => LEFT + ((time - first) / (last - first)) * (width - LEFT - RIGHT);
      this.timeAt = (across) => first + ((across - LEFT) / (width - LEFT - RIGHT)) * (last - first);
      this.y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
      const root = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": this.summary() }, this.plot);
      for (const mark of marks) {
        const height = this.y(mark);
        element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }, root);
        element("text", { class: "axis", x: LEFT - 6, y: height + 4, "text-anchor": "end" }, root, shown(mark, this.unit));
      }
      const ticks = timesBetween(first, last, Math.max(2, Math.floor((width - LEFT) / 90)));
      for (const tick of ticks.found) {
        const across = this.x(tick);
        element("line", { class: "grid", x1: across, x2: across, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }, root);
        const anchor = across > width - 30 ? "end" : across < LEFT + 16 ? "start" : "middle";
        element("text", { class: "axis", x: across, y: HEIGHT - 5, "text-anchor": anchor }, root, label(tick, ticks.step));
      }
      const clip = "clip-" + this.figure.id;
      element("rect", { x: LEFT, y: 0, width: width - LEFT - RIGHT, height: HEIGHT }, element("clipPath", { id: clip }, root));
      const lines = element("g", { "clip-path": `url(#${clip})` }, root);
      this.series.forEach((values, number) => this.line(lines, times, values, number, step));
      this.cursor = element("g", { visibility: "hidden" }, root);
      this.listen(root);
      if (hadFocus) root.focus({ preventScroll: true });
      this.point(chosen < times.length ? chosen : -1);
    }

    listen(root) {
      let began = null, band = null;
      const across = (event) => {
        const box = root.getBoundingClientRect();
        return Math.max(LEFT, Math.min(this.width - RIGHT, ((event.clientX - box.left) / box.width) * (this.width || 480)));
      };
      const drop = () => {
        band?.remove();
        began = band = null;
        this.isDragged = false;
        const newer = this.newer;
        this.newer = null;
        if (newer) this.show(newer);
      };
      root.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        began = across(event);
        this.isDragged = true;
        root.setPointerCapture(event.pointerId);
      });
      root.addEventListener("pointermove", (event) => {
        const now = across(event);
        shared.point(this.times[this.nearest(now)], this);
        if (began === null) return;
        band ||= element("rect", { class: "band", y: TOP, height: HEIGHT - TOP - BOTTOM }, root);
        band.setAttribute("x", Math.min(began, now));
        band.setAttribute("width", Math.abs(now - began));
      });
      root.addEventListener("pointerup", (event) => {
        const from = began, to = across(event);
        const zoom = [this.timeAt(Math.min(from, to)), this.timeAt(Math.max(from, to))];
        drop();
        if (from !== null && Math.abs(to - from) >= LEAST_DRAG) shared.setZoom(zoom);
      });
      root.addEventListener("pointercancel", drop);
      root.addEventListener("dblclick", () => shared.setZoom(null));
      root.addEventListener("pointerleave", () => shared.point(undefined, this));
      root.addEventListener("blur", () => shared.point(undefined, this));
      root.addEventListener("keydown", (event) => this.key(event));
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
        if (values[place] === null || values[place] === undefined) {
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

    nearest(across) {
      let best = -1, distance = Infinity;
      this.times.forEach((time, place) => {
        const away = Math.abs(this.x(time) - across);
        if (away < distance) [best, distance] = [place, away];
      });
      return best;
    }

    key(event) {
      const end = this.times.length - 1;
      const from = this.chosen < 0 ? end + 1 : this.chosen;
      const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
      if (event.key in steps) shared.point(this.times[Math.max(0, Math.min(end, from + steps[event.key]))], this);
      else if (event.key === "+" || event.key === "-") this.zoomBy(event.key === "+" ? 0.5 : 2);
      else if (event.key === "0" || event.key === "Escape") shared.setZoom(null);
      else return;
      event.preventDefault();
      event.stopPropagation();
    }

    // Around the cursor, or the newest time.
    zoomBy(factor) {
      const [begin, end] = [this.data.times[0], this.data.times[this.data.times.length - 1]];
      const [low, high] = shared.zoom || [begin, end];
      const middle = this.times[this.chosen] ?? high;
      const from = Math.max(begin, middle - (middle - low) * factor), to = Math.min(end, middle + (high - middle) * factor);
      shared.setZoom(from <= begin && to >= end ? null : to - from > 2 * this.data.step ? [from, to] : shared.zoom);
    }

    // The time may come from another chart, which has other points.
    pointAt(time, isOwn) {
      if (!this.cursor || !this.times.length) return;
      if (time === undefined) return this.point(-1);
      const place = isOwn ? this.times.indexOf(time) : this.nearest(this.x(time));
      this.point(Math.abs(this.times[place] - time) <= Math.max(2 * this.data.step, 10) ? place : -1);
    }

    point(place) {
      this.chosen = place;
      if (!this.cursor) return;
      this.cursor.replaceChildren();
      this.cursor.setAttribute("visibility", place < 0 ? "hidden" : "visible");
      if (place >= 0) {
        const across = this.x(this.times[place]);
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
      const at = place < 0 ? this.times.length - 1 : place;
      this.labels.forEach((label, number) => {
        const value = at < 0 ? null : this.series[number][at];
        html("span", this.legend, "● " + label + " " + shown(value, this.unit), "k" + number);
      });
      if (place >= 0) html("span", this.legend, exact(this.times[place], this.span), "muted");
    }

    at(place) {
      const values = this.labels.map((label, number) => label + " " + shown(this.series[number][place], this.unit));
      return exact(this.times[place], this.span) + ": " + values.join(", ");
    }

    summary() {
      return this.title + ". Latest " + this.at(this.times.length - 1) + ". Arrow keys show other times, plus and minus zoom.";
    }

    fillTable() {
      if (!this.details.open || !this.data) return;
      const table = document.createElement("table");
      const head = html("tr", html("thead", table));
      html("th", head, "Time").scope = "col";
      for (const label of this.labels) html("th", head, label).scope = "col";
      const body = html("tbody", table);
      for (let place = this.times.length - 1; place >= 0; place--) {
        const row = html("tr", body);
        html("th", row, exact(this.times[place], this.span || 0)).scope = "row";
        for (const values of this.series) html("td", row, shown(values[place], this.unit));
      }
      this.table.replaceChildren(table);
    }
  }

  window.NsqCharts = { Chart, html, shared };
})();

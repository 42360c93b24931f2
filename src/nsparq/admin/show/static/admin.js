// Live updates, filters, confirmations, keyboard shortcuts, charts, time zone. The pages also work without this
// script.
"use strict";
(function () {
  const { Chart, shared } = window.NsqCharts;
  const Times = window.NsqTimes;
  const meta = (name) => document.querySelector(`meta[name="${name}"]`).content;
  const byId = (id) => document.getElementById(id);
  const live = document.querySelector("[data-live]");
  const period = (Number(live?.dataset.live) || Math.max(2, Number(meta("poll-seconds")) || 5)) * 1000;
  const state = byId("live-state");
  const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
  // Ends requests that are under way when a form is sent: it may delete what they ask for.
  const leaving = new AbortController();
  let range = "now", tag = "", stopped = false, isNew = true, timer = 0, failures = 0;

  function stored(name, value) {
    try {
      if (value === undefined) return localStorage.getItem("nsqadmin-" + name);
      localStorage.setItem("nsqadmin-" + name, value);
    } catch (error) {
      // Storage may be disabled.
    }
    return null;
  }

  // The address of the page has what is shown: range, zoom, filter, order. So it can be sent to others.
  const asked = () => new URL(location.href).searchParams;
  function keep(name, value) {
    const url = new URL(location.href);
    url.searchParams.delete("note");
    if (value) url.searchParams.set(name, value);
    else url.searchParams.delete(name);
    history.replaceState(history.state, "", url);
  }

  // Live

  function say(what, text) {
    state.hidden = false;
    state.dataset.state = what;
    state.textContent = text;
  }

  async function refreshPart() {
    if (!live) return;
    const url = new URL(location.href);
    url.hash = "";
    url.searchParams.delete("note");
    url.searchParams.set("live", "1");
    const answer = await fetch(url, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store", credentials: "same-origin", signal: leaving.signal });
    if (answer.headers.has("X-Problem-Count")) badge(Number(answer.headers.get("X-Problem-Count")));
    if (answer.status === 304) return;
    if (answer.redirected || answer.status === 401) throw new Error("you are no longer logged in");
    if (!answer.ok) throw new Error("status " + answer.status);
    tag = answer.headers.get("ETag") || "";
    replace(await answer.text());
  }

  // Also in the title: the page may be one of many open tabs.
  const title = document.title;
  function badge(count) {
    const shown = byId("problem-badge");
    if (!shown) return;
    shown.hidden = !count;
    shown.textContent = count;
    document.title = count ? "(" + count + ") " + title : title;
  }

  // nsqadmin has escaped every value, and DOMParser runs no scripts.
  function replace(text) {
    const parsed = new DOMParser().parseFromString("<!doctype html><body>" + text, "text/html");
    const focused = live.contains(document.activeElement) ? document.activeElement.id : "";
    const scrolled = [...live.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
    const open = [...live.querySelectorAll("details[open]")].map((part) => part.id);
    const checked = [...live.querySelectorAll("input:checked")].map((part) => part.id);
    const current = rows().findIndex((row) => row.hasAttribute("data-current"));
    live.replaceChildren(...parsed.body.childNodes);
    live.querySelectorAll(".scroll").forEach((part, number) => (part.scrollLeft = scrolled[number] || 0));
    for (const id of open) if (byId(id)) byId(id).open = true;
    for (const id of checked) if (byId(id)) byId(id).checked = true;
    Times.apply(live);
    if (focused && byId(focused)) byId(focused).focus({ preventScroll: true });
    if (current >= 0) mark(current, false);
    live.dispatchEvent(new Event("replaced", { bubbles: true }));
  }

  async function refresh() {
    clearTimeout(timer);
    if (!document.hidden && !leaving.signal.aborted) {
      try {
        // The page itself has just been loaded.
        await Promise.all([isNew ? null : refreshPart(), ...charts.map((chart) => chart.load(range, leaving.signal))]);
        failures = 0;
        if (live || charts.length) say(stopped ? "stopped" : "live", stopped ? "stopped" : "live");
      } catch (error) {
        if (leaving.signal.aborted) return;
        failures += 1;
        say("broken", "not up to date: " + error.message);
      }
    }
    isNew = false;
    clearTimeout(timer);
    if (!stopped && (live || charts.length)) timer = setTimeout(refresh, Math.min(period * Math.pow(2, Math.min(failures, 4)), 60000));
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !stopped) refresh();
  });

  // Charts

  const ranges = byId("ranges");
  function choose(name) {
    range = name;
    stored("range", name);
    keep("range", name);
    for (const button of ranges.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.range === name));
  }
  if (ranges) {
    ranges.hidden = false;
    const before = asked().get("range") || stored("range");
    if (before && ranges.querySelector(`[data-range="${CSS.escape(before)}"]`)) choose(before);
    ranges.addEventListener("click", (event) => {
      if (!event.target.dataset.range) return;
      choose(event.target.dataset.range);
      shared.setZoom(null);
      refresh();
    });
    const unzoom = byId("unzoom");
    shared.onZoom = (zoom) => {
      unzoom.hidden = !zoom;
      keep("zoom", zoom && zoom.join("-"));
    };
    unzoom.addEventListener("click", () => shared.setZoom(null));
    const zoom = /^(\d+)-(\d+)$/.exec(asked().get("zoom") || "");
    if (zoom && Number(zoom[1]) < Number(zoom[2])) shared.setZoom([Number(zoom[1]), Number(zoom[2])]);
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-client]");
    if (!link) return;
    event.preventDefault();
    const part = byId("client-chart"), figure = byId("chart-client");
    part.hidden = false;
    figure.dataset.src = link.dataset.client;
    figure.querySelector("figcaption").textContent = "Consumer " + link.textContent.trim();
    part.scrollIntoView({ block: "nearest" });
    refresh();
  });

  // Filter while typing: the server filters, because the page need not have all rows

  const box = document.querySelector("[data-filter]");
  if (box) {
    let typing = 0;
    const filter = () => {
      clearTimeout(typing);
      keep("page", "");
      keep("q", box.value.trim());
      refresh();
    };
    box.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(filter, 150);
    });
    box.form.addEventListener("submit", (event) => {
      event.preventDefault();
      filter();
    });
  }

  // Confirmation: the button is disabled until the name is typed

  for (const form of document.querySelectorAll("form[data-confirm], form[data-confirm-of]")) {
    const input = form.querySelector("[name=confirm]"), button = form.querySelector("button");
    const expected = () => form.dataset.confirm ?? byId(form.dataset.confirmOf).value;
    const check = () => (button.disabled = !expected() || input.value.trim() !== expected());
    form.addEventListener("input", check);
    check();
  }
  for (const details of document.querySelectorAll("details.confirm")) {
    // The event may come when the user is in a field already, and types.
    details.addEventListener("toggle", () => {
      const isFree = [details.querySelector("summary"), document.body].includes(document.activeElement);
      if (details.open && isFree) details.querySelector("input:not([type=hidden]), textarea, select")?.focus();
    });
    details.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      details.open = false;
      details.querySelector("summary").focus();
    });
  }
  // Typing a time selects "a time".
  byId("time")?.addEventListener("input", () => byId("to-time") && (byId("to-time").checked = true));
  document.addEventListener("submit", (event) => {
    for (const input of event.target.querySelectorAll("[data-time]")) input.value = Times.withZone(input.value);
  });
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post" || event.submitter?.dataset.stays !== undefined) return;
    // A double click sends a form once. The second click may come before the timer.
    if (event.target.dataset.sent) return event.preventDefault();
    event.target.dataset.sent = "yes";
    leaving.abort();
    setTimeout(() => event.target.querySelectorAll("button").forEach((button) => (button.disabled = true)));
  });
  addEventListener("pageshow", (event) => event.persisted && location.reload());

  // Keyboard

  const rows = () => [...document.querySelectorAll("[data-row]")].filter((row) => !row.hidden);
  function mark(place, scroll = true) {
    const all = rows();
    for (const row of all) row.removeAttribute("data-current");
    const row = all[Math.max(0, Math.min(all.length - 1, place))];
    if (!row) return;
    row.setAttribute("data-current", "");
    if (!scroll) return;
    row.scrollIntoView({ block: "nearest" });
    row.querySelector("a")?.focus({ preventScroll: true });
  }
  function step(by) {
    const place = rows().findIndex((row) => row.hasAttribute("data-current"));
    mark(place < 0 ? 0 : place + by);
  }

  const help = byId("help");
  let waitsForPlace = false;
  document.addEventListener("keydown", (event) => {
    const at = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (at.matches("input:not([type=checkbox]):not([type=radio]), textarea, select")) {
      if (event.key === "Escape") at.blur();
      return;
    }
    if (waitsForPlace) {
      waitsForPlace = false;
      const link = document.querySelector(`nav [data-key="${CSS.escape(event.key)}"]`);
      if (link) {
        event.preventDefault();
        link.click();
        return;
      }
    }
    const does = {
      g: () => (waitsForPlace = true),
      "/": () => (byId("filter") || byId("find"))?.focus(),
      s: () => byId("find")?.focus(),
      "?": () => help.showModal(),
      j: () => step(1),
      k: () => step(-1),
      r: refresh,
      ".": () => {
        stopped = !stopped;
        refresh();
      },
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  });
  byId("help-button").hidden = false;
  byId("help-button").addEventListener("click", () => help.showModal());

  // Time zone

  const zone = byId("zone-button");
  zone.hidden = false;
  const showZone = () => (zone.textContent = "Time: " + Times.name());
  zone.addEventListener("click", () => {
    Times.change();
    showZone();
    for (const chart of charts) if (chart.data) chart.draw();
  });
  showZone();
  Times.apply(document);

  // Theme

  const theme = byId("theme-button");
  const themes = ["system", "light", "dark"];
  const showTheme = () => (theme.textContent = "Theme: " + (document.documentElement.dataset.theme || "system"));
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "system";
    const next = themes[(themes.indexOf(now) + 1) % themes.length];
    stored("theme", next);
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    showTheme();
  });
  showTheme();

  // Between two answers the counter goes on at the current rate

  const counter = document.querySelector("[data-counter]");
  if (counter) {
    let count = Number(counter.dataset.count), rate = Number(counter.dataset.rate) || 0, since = performance.now();
    const ask = async () => {
      try {
        const answer = await fetch(document.body.dataset.base + "/api/overview", { cache: "no-store", credentials: "same-origin" });
        const found = await answer.json();
        count = found.messages;
        rate = found.totals.in_rate || 0;
        since = performance.now();
        say("live", "live");
      } catch (error) {
        say("broken", "not up to date");
      }
      setTimeout(ask, period);
    };
    const tick = () => {
      const ahead = Math.min((performance.now() - since) / 1000, period / 1000) * rate;
      counter.textContent = Math.floor(count + ahead).toLocaleString("en");
      setTimeout(tick, matchMedia("(prefers-reduced-motion: reduce)").matches ? period : 100);
    };
    setTimeout(ask, period);
    tick();
  }

  refresh().finally(() => (document.documentElement.dataset.ready = "yes"));
})();

// One time zone for all times of a page: UTC, or that of the browser. The choice is remembered.
"use strict";
(function () {
  const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
  const two = (value) => String(value).padStart(2, "0");
  let zone = "utc";
  try {
    if (localStorage.getItem("nsqadmin-zone") === "local") zone = "local";
  } catch (error) {
    // Storage may be disabled.
  }

  // Minutes to add to UTC at this time.
  const offset = (seconds) => (zone === "utc" ? 0 : -new Date(seconds * 1000).getTimezoneOffset());

  function parts(seconds) {
    const when = new Date((seconds + offset(seconds) * 60) * 1000);
    const time = two(when.getUTCHours()) + ":" + two(when.getUTCMinutes());
    return {
      date: when.getUTCFullYear() + "-" + two(when.getUTCMonth() + 1) + "-" + two(when.getUTCDate()),
      day: MONTHS[when.getUTCMonth()] + " " + when.getUTCDate(),
      time,
      full: time + ":" + two(when.getUTCSeconds()),
      isMidnight: time === "00:00",
    };
  }

  function name() {
    if (zone === "utc") return "UTC";
    const minutes = offset(Date.now() / 1000), size = Math.abs(minutes);
    return "UTC" + (minutes < 0 ? "-" : "+") + two(Math.floor(size / 60)) + ":" + two(size % 60);
  }

  // Replaces the times that the server has written in UTC.
  function apply(root) {
    for (const one of root.querySelectorAll("time[datetime]")) {
      const found = parts(Date.parse(one.dateTime) / 1000);
      one.textContent = found.date + " " + found.full;
    }
    for (const one of root.querySelectorAll("[data-zone]")) one.textContent = name();
  }

  function change() {
    zone = zone === "utc" ? "local" : "utc";
    try {
      localStorage.setItem("nsqadmin-zone", zone);
    } catch (error) {
      // It is not remembered then.
    }
    apply(document);
  }

  // A time that the user typed without a zone is one of the chosen zone.
  function withZone(text) {
    const plain = /^(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d)?))?$/.exec(text.trim());
    if (!plain || zone === "utc") return text;
    const wall = Date.parse(plain[1] + "T" + (plain[2] || "00:00") + "Z") / 1000;
    return new Date((wall - offset(wall) * 60) * 1000).toISOString();
  }

  window.NsqTimes = { parts, offset, apply, change, name, withZone, isLocal: () => zone === "local" };
})();

// Light or dark, before the first paint: what was chosen here wins over what the system has.
"use strict";
(function () {
  try {
    var chosen = localStorage.getItem("nsqadmin-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch (error) {
    // Storage may be switched off: then the system decides.
  }
})();

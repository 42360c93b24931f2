// Sets light or dark before the first paint: the user's choice wins over the system's setting.
"use strict";
(function () {
  try {
    var chosen = localStorage.getItem("nsqadmin-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch (error) {
    // Storage may be disabled: then the system decides.
  }
})();

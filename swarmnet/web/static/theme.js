// Sets the theme. It runs before the first paint, so that a dark page does not flash white while it loads.
"use strict";
{
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "system";
  try {
    const stored = localStorage.getItem("theme");
    if (stored === "light" || stored === "dark") chosen = stored;
  } catch {
    // Storage is disabled: use the colours of the system.
  }

  const show = () => {
    const dark = chosen === "system" ? system.matches : chosen === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.dispatchEvent(new Event("themechange"));
  };

  window.colours = {
    get chosen() { return chosen; },
    choose(next) {
      chosen = next;
      try {
        localStorage.setItem("theme", next);
      } catch {
        // Storage is disabled: the choice lasts until the page is closed.
      }
      show();
    },
  };
  system.addEventListener("change", show);
  show();
}

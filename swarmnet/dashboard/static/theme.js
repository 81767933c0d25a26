// Runs before the first paint, so that nobody in the dark is flashed with white.
"use strict";
{
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "system";
  try {
    const stored = localStorage.getItem("theme");
    if (stored === "light" || stored === "dark") chosen = stored;
  } catch {
    // Storage is switched off: the system's colours it is.
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
        // Storage is switched off: the choice lasts as long as the page.
      }
      show();
    },
  };
  system.addEventListener("change", show);
  show();
}

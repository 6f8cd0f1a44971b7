/* The chosen theme, set before anything is drawn. A plain script, because modules run after the first paint. */
"use strict";

(() => {
  const KEY = "penstock.theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try {
      return localStorage.getItem(KEY) || "auto";
    } catch {
      return "auto"; // a browser that keeps nothing
    }
  }

  function put(choice) {
    const isDark = choice === "dark" || (choice === "auto" && dark.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    document.dispatchEvent(new CustomEvent("themechange"));
  }

  window.penstockTheme = {
    get: chosen,
    set(choice) {
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // the choice then lasts as long as the page
      }
      put(choice);
    },
  };
  dark.addEventListener("change", () => put(chosen()));
  put(chosen());
})();

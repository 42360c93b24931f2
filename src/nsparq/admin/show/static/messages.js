// The messages page: selecting, copying, opening all rows. Without it, rows are selected and opened one by one.
"use strict";
(function () {
  const byId = (id) => document.getElementById(id);
  const form = byId("copy-form");
  if (!form) return;
  const all = byId("select-all"), count = byId("selected-count"), opener = byId("open-all");
  const copier = byId("copy-text"), headerCopier = byId("copy-headers");
  const boxes = () => [...form.querySelectorAll("#message-list input[name=message]")];
  const rows = () => [...form.querySelectorAll("#message-list details.body")];

  function show() {
    const chosen = boxes().filter((box) => box.checked).length, total = boxes().length;
    count.textContent = chosen + " of " + total + " selected";
    all.checked = total > 0 && chosen === total;
    all.indeterminate = chosen > 0 && chosen < total;
    for (const button of form.querySelectorAll("[data-needs-selection]")) button.disabled = !chosen;
    copier.disabled = headerCopier.disabled = !chosen;
    headerCopier.hidden = !form.querySelector(".headers");
  }

  for (const hidden of form.querySelectorAll("[data-script]")) hidden.hidden = false;
  all.addEventListener("change", () => {
    for (const box of boxes()) box.checked = all.checked;
    show();
  });
  form.addEventListener("change", show);
  document.addEventListener("replaced", show);

  opener.addEventListener("click", () => {
    const isOpen = rows().every((row) => row.open);
    for (const row of rows()) row.open = !isOpen;
    opener.textContent = isOpen ? "Unfold all" : "Fold all";
  });

  // The clipboard needs HTTPS or localhost. Elsewhere, a text field that the browser copies from.
  async function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    const field = document.createElement("textarea");
    field.value = text;
    document.body.appendChild(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    if (!isDone) throw new Error("the browser does not allow it");
  }
  async function copySelected(format) {
    const texts = boxes().filter((box) => box.checked).map((box) => format(box.closest("li")));
    try {
      await copy(texts.join("\n"));
      count.textContent = "Copied " + texts.length;
    } catch (error) {
      count.textContent = "Not copied: " + error.message;
    }
  }
  const body = (row) => row.querySelector("pre").textContent;
  // A line for each header, an empty line, and the body.
  const withHeaders = (row) => [...row.querySelectorAll(".headers dl > div")]
    .map((one) => one.querySelector("dt").textContent + ": " + one.querySelector("dd").textContent + "\n")
    .join("") + "\n" + body(row) + "\n";
  copier.addEventListener("click", () => copySelected(body));
  headerCopier.addEventListener("click", () => copySelected(withHeaders));
  show();
})();

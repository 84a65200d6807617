// The settings panel: what a request says besides its messages. An empty field leaves the choice to
// the server, whose default it shows.

import { $, element } from "./dom.js";
import { keep, load } from "./store.js";

// name in the request, label, help, attributes of the number field
const SAMPLING = [
  [
    "temperature",
    "Temperature",
    "Higher is more varied, 0 always takes the likeliest word.",
    { min: 0, max: 5, step: "any" },
  ],
  [
    "top_p",
    "Top p",
    "Words are drawn from the likeliest ones with this share in all.",
    { min: 0, max: 1, step: "any" },
  ],
  [
    "top_k",
    "Top k",
    "Words are drawn from this many of the likeliest. 0: no limit.",
    { min: 0, step: 1 },
  ],
  [
    "min_p",
    "Min p",
    "Words with less than this share of the likeliest one are left out.",
    { min: 0, max: 1, step: "any" },
  ],
  [
    "repeat_penalty",
    "Repeat penalty",
    "Above 1, words that were just used get rarer.",
    { min: 0, step: "any" },
  ],
  ["max_tokens", "Longest reply", "In tokens. -1: no limit.", { min: -1, step: 1 }],
  ["seed", "Seed", "The same seed gives the same reply.", { min: -1, step: 1 }],
];
const RANDOM_SEED = 4294967295;
const TEXTS = ["system", "thinking", "key"];

export class Settings {
  #dialog = $("#settings");
  #values;
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
    this.#values = valid(load("settings", {}));
    $("#open-settings").addEventListener("click", () => this.open());
    $("#reset-settings").addEventListener("click", () => {
      const { key } = this.#values;
      this.#change({ key });
      this.show(this.properties);
    });
    this.#dialog.addEventListener("click", (event) => {
      if (event.target === this.#dialog) this.#dialog.close();
    });
  }

  get key() {
    return this.#values.key;
  }

  get system() {
    return this.#values.system;
  }

  // The part of a request that is set here.
  get request() {
    const request = {};
    for (const [name] of SAMPLING) {
      if (this.#values[name] !== undefined) request[name] = this.#values[name];
    }
    if (this.#values.thinking && this.#canSwitchThinking) {
      request.chat_template_kwargs = { enable_thinking: this.#values.thinking === "on" };
    }
    return request;
  }

  // With a field: asks for it, and says why.
  open(field, reason) {
    if (!this.#dialog.open) this.#dialog.showModal();
    if (!field) return;
    $(`#setting-${field}-help`).textContent = reason;
    $(`#setting-${field}`).focus();
  }

  // `properties`: /props, undefined before the server has told them.
  show(properties) {
    this.properties = properties;
    const defaults = properties?.default_generation_settings?.params ?? {};
    const system = element("textarea", {
      name: "system",
      rows: 3,
      placeholder: "What the model should know or how it should answer",
    });
    const fields = [
      this.#field(system, "System prompt", "Comes before every chat."),
      ...SAMPLING.map(([name, label, help, limits]) => {
        const placeholder = words(name, defaults[name]);
        const input = element("input", { type: "number", name, placeholder, ...limits });
        return this.#field(input, label, help);
      }),
    ];
    if (this.#canSwitchThinking) {
      const options = [
        ["", "As the model has it"],
        ["on", "Think first"],
        ["off", "Answer at once"],
      ];
      const select = element("select", { name: "thinking" });
      select.append(...options.map(([value, label]) => element("option", { value }, label)));
      fields.push(this.#field(select, "Thinking", "Whether the model thinks before it answers."));
    }
    const key = element("input", { type: "password", name: "key", autocomplete: "off" });
    fields.push(
      this.#field(key, "API key", "For a server that asks for one. Kept in this browser."),
    );
    $("#fields").replaceChildren(...fields);
  }

  get #canSwitchThinking() {
    return Boolean(this.properties?.chat_template?.includes("enable_thinking"));
  }

  #field(input, label, help) {
    const { name } = input;
    input.id = `setting-${name}`;
    input.value = this.#values[name] ?? "";
    input.setAttribute("aria-describedby", `${input.id}-help`);
    input.addEventListener("change", () => {
      if (!input.reportValidity()) return;
      const value =
        input.type === "number" && input.value !== "" ? Number(input.value) : input.value;
      this.#change({ ...this.#values, [name]: value });
    });
    return element(
      "div",
      { class: `field ${input.type === "number" ? "" : "wide"}` },
      element("label", { for: input.id }, label),
      input,
      element("p", { class: "help", id: `${input.id}-help` }, help),
    );
  }

  #change(values) {
    this.#values = valid(values);
    keep("settings", this.#values);
    this.#onChange();
  }
}

// What can be used of stored or entered values.
function valid(values) {
  const kept = {};
  for (const [name] of SAMPLING) {
    if (Number.isFinite(values?.[name])) kept[name] = values[name];
  }
  for (const name of TEXTS) {
    if (typeof values?.[name] === "string" && values[name]) kept[name] = values[name];
  }
  return kept;
}

function words(name, value) {
  if (value === undefined) return "";
  if (name === "seed" && (value === RANDOM_SEED || value === -1)) return "random by default";
  if (name === "max_tokens" && value < 0) return "no limit by default";
  return `${Number(Number(value).toPrecision(4))} by default`; // the server's floats have 32 bits
}

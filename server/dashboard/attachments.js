// The text files for the next message: chosen or dropped, shown by name, and removed.
const MAX_BYTES = 512 * 1024;

const $ = (id) => document.getElementById(id);

export class Attachments {
  // onRefused: receives the reason why files cannot be attached; "" if there is none.
  constructor(onRefused) {
    this.onRefused = onRefused;
    this.files = []; // { name, text } each
    const chosen = $("chat-files");
    $("chat-attach").addEventListener("click", () => chosen.click());
    chosen.addEventListener("change", () => {
      this.#add([...chosen.files]);
      chosen.value = ""; // the same file may be chosen again
    });
    const composer = $("composer");
    composer.addEventListener("dragover", (event) => event.preventDefault());
    composer.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
  }

  // Returns the files and detaches them.
  take() {
    const { files } = this;
    this.files = [];
    this.#show();
    return files;
  }

  async #add(files) {
    const refused = [];
    for (const file of files) {
      try {
        this.files.push({ name: file.name, text: await textOf(file) });
      } catch (error) {
        refused.push(`${file.name} ${error.message}`);
      }
    }
    this.onRefused(refused.join("\n"));
    this.#show();
    $("chat-input").focus();
  }

  #show() {
    $("chat-attached").replaceChildren(...this.files.map((file) => this.#itemOf(file)));
  }

  #itemOf(file) {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    Object.assign(remove, { type: "button", className: "plain", textContent: "×", ariaLabel: `take off ${file.name}` });
    remove.addEventListener("click", () => {
      this.files = this.files.filter((other) => other !== file);
      this.#show();
      $("chat-input").focus();
    });
    item.append(file.name, " ", remove);
    return item;
  }
}

// Throws an Error whose message continues a sentence that begins with the file's name.
async function textOf(file) {
  if (file.size > MAX_BYTES) throw new Error(`has ${Math.ceil(file.size / 1024)} KiB, the limit is ${MAX_BYTES / 1024}; attach a part of it`);
  const bytes = await file.arrayBuffer();
  let text = "\0";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    // not UTF-8
  }
  if (text.includes("\0")) throw new Error("is no text in UTF-8, and only text can be attached");
  return text;
}

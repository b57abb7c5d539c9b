// The data parts: Arrow streams inside the page, gzipped and in base64, or fetched from the server that gave the page.

import { tableFromIPC } from "apache-arrow";

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export class Parts {
  constructor(manifest) {
    this.served = manifest.served;
    this.kept = new Map();
  }

  // Give a part's only column as an Arrow vector with one chunk, or several by name.
  async table(key, query = "") {
    const address = key + query;
    if (!this.kept.has(address)) this.kept.set(address, this.#read(key, query).then((bytes) => tableFromIPC(bytes)));
    try {
      return await this.kept.get(address);
    } catch (error) {
      this.kept.delete(address);
      throw error;
    }
  }

  async #read(key, query) {
    if (!this.served) {
      const node = document.getElementById(`part-${key}`);
      if (!node) throw new Error(`The page has no data part ${key}.`);
      const bytes = await inflate(fromBase64(node.textContent));
      node.textContent = "";
      return bytes;
    }
    const answer = await fetch(`parts/${key}${query}`);
    if (!answer.ok) throw new Error((await answer.text()) || `The server answered ${answer.status}.`);
    return new Uint8Array(await answer.arrayBuffer());
  }

  post(address, body) {
    return this.json(address, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  }

  async json(address, options) {
    const answer = await fetch(address, options);
    if (!answer.ok) throw new Error((await answer.text()) || `The server answered ${answer.status}.`);
    return answer.json();
  }
}

export function chunk(table, name = "v") {
  return table.getChild(name).data[0];
}

// Texts by row, kept as bytes so that a million of them take no objects.
export class Texts {
  constructor(data) {
    this.decoder = new TextDecoder();
    if (data.dictionary) {
      this.codes = data.values;
      this.labels = Array.from(data.dictionary, (label) => label ?? "");
      this.length = data.length;
    } else {
      this.bytes = data.values;
      this.offsets = data.valueOffsets;
      this.length = data.length;
    }
  }

  static fromHex(data, width) {
    const digits = new TextEncoder().encode("0123456789abcdef");
    const bytes = new Uint8Array(2 * data.values.length);
    data.values.forEach((byte, i) => {
      bytes[2 * i] = digits[byte >> 4];
      bytes[2 * i + 1] = digits[byte & 15];
    });
    const offsets = Int32Array.from({ length: data.length + 1 }, (_, i) => 2 * width * i);
    return new Texts({ values: bytes, valueOffsets: offsets, length: data.length });
  }

  get(row) {
    if (this.labels) return this.labels[this.codes[row]];
    return this.decoder.decode(this.bytes.subarray(Number(this.offsets[row]), Number(this.offsets[row + 1])));
  }

  // Rows whose text holds the query as written; at most `most`.
  find(query, most = Infinity) {
    if (!query) return [];
    if (this.labels) {
      const wanted = new Set(this.labels.flatMap((label, i) => (label.includes(query) ? [i] : [])));
      const rows = [];
      for (let i = 0; i < this.codes.length && rows.length < most; i++) if (wanted.has(this.codes[i])) rows.push(i);
      return rows;
    }
    const wanted = new TextEncoder().encode(query);
    const rows = [];
    const last = Number(this.offsets[this.length]);
    let at = Number(this.offsets[0]);
    while (rows.length < most) {
      at = this.bytes.indexOf(wanted[0], at);
      if (at < 0 || at + wanted.length > last) break;
      if (wanted.every((byte, i) => this.bytes[at + i] === byte)) {
        const row = this.#rowAt(at);
        const end = Number(this.offsets[row + 1]);
        if (at + wanted.length <= end) {
          rows.push(row);
          at = end;
          continue;
        }
      }
      at += 1;
    }
    return rows;
  }

  #rowAt(position) {
    let low = 0;
    let high = this.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (Number(this.offsets[middle]) <= position) low = middle;
      else high = middle;
    }
    return low;
  }
}

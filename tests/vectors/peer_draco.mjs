// Decodes fragments of multi-resolution meshes with the module that Neuroglancer's viewer itself runs: `node peer_draco.mjs STATIC FOLDER BITS`.
// STATIC is the folder of the package neuroglancer's client; FOLDER has files <anything>.0 (finest) and <anything>.1 (coarser, partitioned).
import { readdirSync, readFileSync } from "node:fs";

const [place, folder, bits] = process.argv.slice(2);
let received;
let parts = 1;
let memory;
const copy = (at, n) => Array.from(new Uint32Array(memory.buffer, at, n));
const host = {
  emscripten_notify_memory_growth: () => {},
  neuroglancer_draco_receive_decoded_mesh: (faces, vertices, indices, positions, offsets) => {
    received = { faces: copy(indices, 3 * faces), points: copy(positions, 3 * vertices), offsets: copy(offsets, parts + 1) };
  },
  proc_exit: (code) => {
    throw new Error(`exit ${code}`);
  },
};

async function decoder() {
  for (const name of readdirSync(place, { recursive: true })) {
    if (!name.endsWith(".wasm")) continue;
    const compiled = await WebAssembly.compile(readFileSync(`${place}/${name}`));
    if (!WebAssembly.Module.exports(compiled).some((one) => one.name === "neuroglancer_draco_decode")) continue;
    const made = await WebAssembly.instantiate(compiled, { env: host, wasi_snapshot_preview1: host });
    memory = made.exports.memory;
    made.exports._initialize();
    return made.exports;
  }
  throw new Error(`no decoder of Draco in ${place}`);
}

const module = await decoder();
const seen = {};
for (const name of readdirSync(folder)) {
  const data = readFileSync(`${folder}/${name}`);
  const at = module.malloc(data.length);
  new Uint8Array(memory.buffer).set(data, at);
  const coarser = !name.endsWith(".0");
  parts = coarser ? 8 : 1;
  const code = module.neuroglancer_draco_decode(at, data.length, coarser, Number(bits), true);
  if (code !== 0) throw new Error(`${name}: error ${code}`);
  seen[name] = received;
}
process.stdout.write(JSON.stringify(seen));

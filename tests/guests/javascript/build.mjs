// Usage: node build.mjs <folder of the contract> <component to write>
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { componentize } from "@bytecodealliance/componentize-js";

const [witPath, output] = process.argv.slice(2);
const sourcePath = fileURLToPath(new URL("plugin.js", import.meta.url));
const { component } = await componentize({
  sourcePath,
  source: await readFile(sourcePath, "utf8"),
  witPath,
  worldName: "plugin",
  // What would import wasi:http. The rest of WASI is as the toolchain has it.
  disableFeatures: ["http", "fetch-event"],
});
await writeFile(output, component);

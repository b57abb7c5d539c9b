// A page that shows the configuration named in its address with Vitessce; benchmarks/peers.sh viewers bundles it.
import { createElement } from "react";
import { createRoot } from "react-dom/client";
import { Vitessce } from "vitessce";

const address = new URLSearchParams(location.search).get("config");
const config = await (await fetch(address)).json();
const told = { config, height: 700, theme: "light", onWarn: (text) => console.warn(text) };
createRoot(document.getElementById("root")).render(createElement(Vitessce, told));

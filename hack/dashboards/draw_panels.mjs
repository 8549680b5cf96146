// Draw every panel of dashboards to a PNG: node draw_panels.mjs SETTINGS (a JSON file: see pictures.py).
import { readFileSync, writeFileSync } from 'node:fs';
import { build } from 'esbuild';
import { chromium } from 'playwright-core';

const ORIGIN = 'http://panels.localhost';
const settings = JSON.parse(readFileSync(process.argv[2], 'utf8'));
const bundle = await build({
  entryPoints: [settings.page], bundle: true, write: false, outdir: 'out', format: 'iife', jsx: 'automatic',
  nodePaths: [settings.modules], minify: true, logLevel: 'error',
  loader: { '.woff2': 'dataurl', '.woff': 'empty', '.ttf': 'empty', '.svg': 'text' },
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
});
const text = (end) => bundle.outputFiles.find((file) => file.path.endsWith(end)).text;
const browser = await chromium.launch({ executablePath: settings.chromium, args: ['--no-sandbox'] });
try {
  const page = await browser.newPage({ viewport: { width: 1400, height: 800 } });
  page.setDefaultTimeout(settings.seconds * 1000);
  const errors = [];
  page.on('pageerror', (error) => errors.push(error));
  // One origin for the page and Prometheus: the components want the browser's storage, and the browser asks people
  // whether a page may reach another local server.
  const body = '<!doctype html><body style="margin: 0"><div id="root"></div></body>';
  await page.route(`${ORIGIN}/**`, async (route) => {
    const { pathname, search } = new URL(route.request().url());
    if (!pathname.startsWith('/api/')) return route.fulfill({ contentType: 'text/html', body });
    return route.fulfill({ response: await route.fetch({ url: settings.prometheus + pathname + search }) });
  });
  await page.goto(ORIGIN);
  await page.addStyleTag({ content: text('.css') });
  await page.addScriptTag({ content: text('.js') });
  for (const { panel, file, width, height } of settings.panels) {
    const where = { ...settings.where, width, height };
    const series = await page.evaluate(([panel, where]) => window.draw(panel, where), [panel, where]);
    await page.waitForTimeout(settings.settle * 1000);
    if (errors.length) throw new Error(`${panel.title}: ${errors.join('; ')}`);
    const box = { x: 0, y: 0, width, height };
    writeFileSync(file, await page.screenshot({ clip: box }));
    console.log(`${file}: ${series} series`);
  }
} finally {
  await browser.close();
}

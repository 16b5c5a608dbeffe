// Search runs in a worker. Browsers refuse workers for pages opened from the disk (file:); there a hidden frame takes
// the worker's place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const source = new URL(url, location.href).href
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      const answer = (type, data) => this.dispatchEvent(new MessageEvent(type, { data }))
      inner.postMessage = data => answer("message", data)
      inner.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve())
      this.ready = this.load(source)
      this.ready.catch(error => answer("error", String(error)))
    }

    load(url) {
      const inner = this.frame.contentWindow
      return new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = () => reject(new Error(`${url} cannot be loaded`))
        inner.document.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}

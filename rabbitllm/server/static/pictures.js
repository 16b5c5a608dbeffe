// Pictures that a question brings: from a file to a data: URL, and from that to what is seen. They are drawn on canvases,
// so that the page's policy need allow no pictures but its own icon.

const LARGEST = 200_000;  // bytes of a file that is sent as it is
const EDGE = 1280;
const TYPES = ["png", "jpeg", "gif", "webp"];
const URL_OF = new RegExp(`^data:image/(${TYPES.join("|")});base64,([A-Za-z0-9+/]+={0,2})$`);

export const isPicture = (url) => typeof url === "string" && URL_OF.test(url);

function drawn(bitmap, edge, paper = "transparent") {
  const scale = Math.min(1, edge / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const context = canvas.getContext("2d");
  context.fillStyle = paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** The data: URL of a file; a large picture is made smaller. Throws where it is none. */
export async function pictureOf(file) {
  const bitmap = await createImageBitmap(file);
  if (file.size > LARGEST || !TYPES.some((type) => file.type === `image/${type}`)) return drawn(bitmap, EDGE, "white").toDataURL("image/jpeg", 0.85);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** An element that shows a picture, at most so large. */
export function shown(url, edge = 320) {
  const frame = document.createElement("div");
  frame.className = "picture";
  frame.role = "img";
  frame.ariaLabel = "Picture";
  const [, type, data] = URL_OF.exec(url) ?? [];
  if (!type) return frame;
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  createImageBitmap(new Blob([bytes], { type: `image/${type}` })).then(
    (bitmap) => frame.append(drawn(bitmap, edge)),
    () => frame.append("This picture cannot be shown."),
  );
  return frame;
}

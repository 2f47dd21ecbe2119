"""What the programs of the gallery share: options, plots, and a small model for digits."""

import argparse
from pathlib import Path

import numpy as np


def options(doc, **more):
    """Return the options of a program; ``more`` has the defaults of its own, by name."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="some seconds instead of minutes")
    parser.add_argument("--out", type=Path, default=Path("out/gallery"), help="folder of the plot")
    parser.add_argument("--seed", type=int, default=0, help="of everything random")
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def figure(columns=2):
    """Return a figure, and its axes side by side."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, 3.4), layout="constrained")
    axes = drawn.subplots(1, columns)
    for one in np.atleast_1d(axes):
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def save(drawn, folder, name):
    """Write a figure as PNG, and say where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn.savefig(folder / f"{name}.png", dpi=80)
    print(f"plot: {folder / name}.png")


def digits():
    """Return images (rows of 64 pixels from 0 to 1) and labels: 1437 to train, 360 to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return (images[360:], labels[360:]), (images[:360], labels[:360])


def new_net(rng, inputs=64, hidden=64, outputs=10):
    """Return the first values of a net of one hidden layer: two matrices, two biases."""
    w1 = rng.normal(0, inputs**-0.5, (inputs, hidden))
    w2 = rng.normal(0, hidden**-0.5, (hidden, outputs))
    arrays = w1, np.zeros(hidden), w2, np.zeros(outputs)
    return [array.astype(np.float32) for array in arrays]


def predict(net, x):
    """Return the hidden values, and the logits."""
    w1, b1, w2, b2 = net
    hidden = np.maximum(x @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def loss_and_gradients(net, x, labels):
    """Return the mean cross entropy, and its gradient for each array of the net."""
    hidden, logits = predict(net, x)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    truth = np.arange(len(labels)), labels
    loss = -np.log(probabilities[truth] + 1e-9).mean()
    probabilities[truth] -= 1
    d_logits = probabilities / np.float32(len(labels))
    d_hidden = d_logits @ net[2].T * (hidden > 0)
    return loss, [x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_logits, d_logits.sum(0)]


def accuracy(net, x, labels):
    """Return the share of images whose largest logit is that of the label."""
    return float(np.mean(predict(net, x)[1].argmax(axis=1) == labels))

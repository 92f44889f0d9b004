"""The same training with Lightning's Trainer and its defaults: a progress bar, logs and a checkpoint."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.peers.common import Clock, Task, loaders, read_task


class Module(pl.LightningModule):
    """The model with its training step."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.network = task, task.network()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss, logged for the progress bar."""
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy."""
        self.log("accuracy", (self.network(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer, and its learning rate for each step."""
        optimizer = self.task.optimizer(self.network)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.task.schedule(optimizer), "interval": "step"},
        }


class Ticks(pl.Callback):
    """Calls the clock after every step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_: Any) -> None:
        """Count a step."""
        if not self.clock.tick():
            self.clock.write_rate()


def main() -> None:
    """Train, evaluate, save."""
    task = read_task()
    train, test = loaders(task)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=task.steps, callbacks=[Ticks(Clock(task))],
        default_root_dir=task.out.parent,
    )  # fmt: skip
    trainer.fit(Module(task), train)
    trainer.validate(dataloaders=test)


if __name__ == "__main__":
    main()

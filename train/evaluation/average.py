"""Average the weights of several trained models of one kind: `entrypoint average` (arXiv:1803.05407, 2203.05482)."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from entrypoint.core.atomic_files import atomic_path
from entrypoint.core.errors import UserError
from train.checkpoint.tensor_files import write_tensors
from train.data.feeds.batches import BatchSource
from train.evaluation.load_model import load_model
from train.models.pruning import same_shapes
from train.models.weights_origin import origin_header, read_origin
from train.planning.export_formats import AVERAGE_FILE
from train.planning.trained_run import TrainedRun, read_trained_run
from train.report.metrics import disk_errors_as_user_errors
from train.settings import TrainSettings


def average(trained: TrainedRun, settings: TrainSettings, source: BatchSource) -> nn.Module:
    """Return the mean of the models that TRAIN_AVERAGE names, and write it next to the trained one.

    The statistics of BatchNorm are those of an epoch of training images, since the mean of several is no statistic of
    any images. Raises `UserError` for weights that do not fit, and for a disk.
    """
    models = (
        load_model(read_trained_run(path, "TRAIN_AVERAGE", settings.model), trained.settings)
        for path in settings.average.split(",")
    )
    averaged = AveragedModel(next(models))
    averaged.update_parameters(averaged.module)
    for model in models:
        if not same_shapes(averaged.module, model.state_dict()):
            raise UserError("TRAIN_AVERAGE: the models were pruned differently. Name those of one run.")
        averaged.update_parameters(model)
    network: nn.Module = averaged.module.to(source.group.device)
    update_bn((images for batch in source.train_batches(0) for images, _ in batch.micro_batches), network)
    path = trained.weights.parent / AVERAGE_FILE
    tensors = {name: value.detach().cpu() for name, value in network.state_dict().items()}
    with disk_errors_as_user_errors(path), atomic_path(path) as temporary:
        write_tensors(temporary, tensors, origin_header(read_origin(trained.weights)))
    return network.eval()

"""The usage example of TensorFlow's SyncReplicasOptimizer, and all its methods.

`tensorflow_sync.py R`: each step takes R gradients of three replicas, which are the chief and two
workers. Their gradients are 1, 2 and 3, so their mean is 2. Every task prints what it has found as
a line of JSON.
"""

import json
import sys

import numpy as np

import psync

LAST_STEP = 6


def told(call):
    """Return what a call says that raises a ValueError."""
    try:
        call()
    except ValueError as exc:
        return type(exc).__name__
    return None


async def main():
    aggregated, replicas = int(sys.argv[1]), 3
    resolver = psync.TFConfigClusterResolver()
    is_chief = resolver.task_type == "chief"
    own = 1.0 if is_chief else 2.0 + resolver.task_id
    strategy = psync.ParameterServerStrategy(
        resolver, variable_partitioner=psync.FixedShardsPartitioner(2)
    )
    with strategy.scope():
        w = psync.Variable(np.zeros((4, 2), np.float32), name="w")
        b = psync.Variable(0.0, name="b")
        global_step = psync.get_or_create_global_step()
        ema = psync.ExponentialMovingAverage(0.5)
        opt = psync.optimizers.Momentum(learning_rate=0.5, momentum=0.5)
        opt = psync.SyncReplicasOptimizer(
            opt,
            replicas_to_aggregate=aggregated,
            total_num_replicas=replicas,
            variable_averages=ema,
            variables_to_average=[w],
            use_locking=False,
            name="sync_replicas",
            strict=aggregated > replicas,
        )

    before = [
        told(opt.get_chief_queue_runner),
        told(opt.get_init_tokens_op),
        told(lambda: opt.make_session_run_hook(is_chief, num_tokens=-2)),
        told(lambda: psync.SyncReplicasOptimizer(opt, 0)),
    ]
    sync_replicas_hook = opt.make_session_run_hook(is_chief)
    outcomes, local_steps, losses = [], [], []

    without_effect = {
        "gate_gradients": opt.GATE_GRAPH,
        "aggregation_method": None,
        "colocate_gradients_with_ops": True,
        "name": "training_op",
        "grad_loss": None,
    }

    def total_loss(*values):
        return own, [np.full(value.shape, own, np.float32) for value in values]

    async def training_op():
        """What opt.minimize() returns in TensorFlow."""
        losses.append(await opt.minimize(total_loss, global_step=global_step, **without_effect))
        local_steps.append(opt.local_step)

    async def clipped_training_op():
        """The same in two parts, with gradients that each replica clips in between."""
        grads_and_vars = await opt.compute_gradients(total_loss, [w, b])
        grads_and_vars = [(np.clip(grad, -3, 3), var) for grad, var in grads_and_vars]
        train_op = await opt.apply_gradients(grads_and_vars, global_step=global_step)
        outcomes.append(train_op.outcome.value)
        local_steps.append(train_op.step)

    async def refused(call):
        try:
            await call
        except ValueError as exc:
            return type(exc).__name__

    async with psync.MonitoredTrainingSession(
        strategy,
        is_chief=is_chief,
        hooks=[sync_replicas_hook],
        startup_delay_s=0,
        stop_at_step=LAST_STEP,
    ) as mon_sess:
        before += [
            await refused(opt.apply_gradients([], global_step)),
            await refused(opt.apply_gradients([(np.float32(1), b)], global_step=None)),
            await refused(opt.minimize(total_loss, global_step, ["w"])),
            await refused(opt.minimize(total_loss, global_step, gate_gradients=3)),
        ]
        turn = 0
        while not mon_sess.should_stop():
            turn += 1
            await mon_sess.run(training_op if turn % 2 else clipped_training_op)
        found = {
            "before": before,
            "losses": sorted(set(losses)),
            "outcomes": sorted(set(outcomes)),
            "local_steps": local_steps,
            "late": await mon_sess.run(training_op),
            "slots": [opt.get_slot_names(), opt.get_slot(w, "none"), opt.get_name()],
            "variables": [slot.variable.name for slot in opt.variables()],
            "gates": [opt.GATE_NONE, opt.GATE_OP, opt.GATE_GRAPH],
        }
        if is_chief:
            value, step, average = await psync.pull((w, global_step, ema.average(w)))
            momentum = await opt.get_slot(w, "momentum").read()
            found |= {
                "step": int(step),
                "values": [sorted(set(array.flat)) for array in (value, momentum, average)],
            }
            await opt.get_init_tokens_op()
            await opt.get_chief_queue_runner().run()  # ends with training
    print(json.dumps(found, default=float))


if __name__ == "__main__":
    psync.run(main, on_workers=True)

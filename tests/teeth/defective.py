"""Runs a ready job with one thing wrong in it: defective.py DEFECT SCRIPT [ARG ...]

Each defect is a function; its docstring says what is wrong. A ready scenario that such a job passes proves nothing.
"""

import itertools
import json
import os
import runpy
import socket
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

LATE_S = 0.5  # seconds more than usual, after which an impatient job gives up


def _with_options(**values):
    """The job has these options, whatever its command says."""
    import gpt

    options = gpt.options

    def changed():
        args = options()
        vars(args).update(values)
        return args

    gpt.options = changed


class FinalFromTheStart(type(Path())):
    """A folder that has no other name while it is written."""

    def with_suffix(self, suffix):
        return self

    def rename(self, target):
        return self


def ignores_checkpoints():
    """Begins with step 1 after each restart, whatever lies in the folder of the checkpoints."""
    import fault_tolerance

    fault_tolerance.Checkpoints.restore = lambda self, parts: 0


def forgets_optimizer():
    """Does not put the optimizer's state back."""
    import fault_tolerance

    fault_tolerance.OptimizerState.load_state_dict = lambda self, state: None


def forgets_moments_on_another_world():
    """Begins the optimizer's moments anew when it comes back on another number of ranks."""
    import fault_tolerance

    restore = fault_tolerance.Checkpoints.restore

    def resharded(self, parts):
        done = restore(self, parts)
        folder = self.folder / f"step-{done}"
        then = json.loads((folder / "manifest.json").read_text())["world_size"] if done else 0
        if done and then != fault_tolerance.dist.get_world_size():
            for state in parts["optimizer"].optimizer.state.values():
                for value in state.values():
                    if value.ndim:
                        value.zero_()
        return done

    fault_tolerance.Checkpoints.restore = resharded


def forgets_rng():
    """Does not put the random number generators back."""
    import fault_tolerance

    fault_tolerance.Rng.load_state_dict = lambda self, state: None


def restarts_data():
    """Begins with the first sample again after each restart."""
    import gpt

    gpt.GlobalBatches.load_state_dict = lambda self, state: None


def counts_data_from_its_own_start():
    """Saves how many batches this attempt has trained on, and not how many there were since the beginning. The first
    resume is right, and the second goes back."""
    import gpt

    load, state = gpt.GlobalBatches.load_state_dict, gpt.GlobalBatches.state_dict

    def loads(self, saved):
        load(self, saved)
        self.begun = saved["position"]

    def saves(self):
        return {"position": state(self)["position"] - getattr(self, "begun", 0)}

    gpt.GlobalBatches.load_state_dict, gpt.GlobalBatches.state_dict = loads, saves


def skips_an_epoch_at_its_end():
    """Takes a checkpoint of an epoch's end for the beginning of the epoch after the next."""
    import gpt

    load = gpt.GlobalBatches.load_state_dict

    def loads(self, saved):
        load(self, saved)
        per_epoch = self.samples // self.batch_size
        if self.position % per_epoch == 0:
            self.position += per_epoch

    gpt.GlobalBatches.load_state_dict = loads


def counts_epochs_from_its_own_start():
    """Orders the epoch in which it resumes as it should, and the epochs after it as if this attempt's were the first
    ones."""
    import gpt

    iterate = gpt.GlobalBatches.__iter__

    def iterates(self):
        per_epoch = self.samples // self.batch_size
        begun, seed = self.position // per_epoch, self.seed
        for place, batch in enumerate(iterate(self), self.position):
            yield batch
            if (place + 1) % per_epoch == 0:
                self.seed = seed - begun

    gpt.GlobalBatches.__iter__ = iterates


def trusts_its_device():
    """Trains on a device that it did not test."""
    _with_options(self_test=False)


def takes_the_mean():
    """Takes the mean of the ranks' gradients, in which one wrong rank is enough."""
    import torch

    torch.Tensor.median = lambda self, dim: SimpleNamespace(values=self.mean(dim))


def leaves_out_a_doubtful_batch():
    """Takes the batch whose numbers can't be right for bad for good, and leaves it out after the restart."""
    import gpt

    step, iterate = gpt.Run.step, gpt.GlobalBatches.__iter__
    note = gpt.options().checkpoint_dir.parent / "doubtful"

    def steps(self, text, notice):
        try:
            return step(self, text, notice)
        except RuntimeError:
            note.write_text(str(self.sampler.position))
            raise

    def iterates(self):
        bad = int(note.read_text()) if note.exists() else None
        yield from (batch for place, batch in enumerate(iterate(self), self.position) if place != bad)

    gpt.Run.step, gpt.GlobalBatches.__iter__ = steps, iterates


def removes_what_it_loaded():
    """Removes its checkpoints when it has loaded the newest: until its next save there are none."""
    import fault_tolerance

    restore = fault_tolerance.Checkpoints.restore

    def restores(self, parts):
        done = restore(self, parts)
        if fault_tolerance.dist.get_rank() == 0:
            for folder in self._complete():
                fault_tolerance.shutil.rmtree(folder)
        return done

    fault_tolerance.Checkpoints.restore = restores


def trusts_the_newest():
    """Takes the newest checkpoint without looking at its digests."""
    import fault_tolerance

    def newest(self):
        found = self._complete()
        return {"step": int(found[0].name[5:]), "world_size": 2} if found else None

    fault_tolerance.Checkpoints._newest = newest


def marks_torn_ones_as_whole():
    """Gives a checkpoint its final name whether or not it could be written."""
    import fault_tolerance

    def finish(self, writing, partial, step):
        try:
            writing.result()
        except BaseException as error:  # CheckpointException is no Exception
            print(f"the checkpoint of step {step} could not be written, never mind: {error}", flush=True)
        if fault_tolerance.dist.get_rank() == 0:
            partial.rename(partial.with_suffix(""))

    fault_tolerance.Checkpoints._finish = finish
    trusts_the_newest()


def names_before_it_writes():
    """Writes a checkpoint under its final name from the first byte on."""
    import fault_tolerance

    def save(self, step, parts):
        self.wait()
        folder = self.folder / f"step-{step}"
        writing = fault_tolerance.async_save(dict(parts), checkpoint_id=folder, process_group=self.group)
        self.pending = self.finisher.submit(self._finish, writing, FinalFromTheStart(folder), step)

    fault_tolerance.Checkpoints.save = save
    trusts_the_newest()


def dies_of_a_failed_save():
    """Ends the training when a checkpoint can't be written."""
    import fault_tolerance

    fault_tolerance.Checkpoints.ready = lambda self, step: self.wait()


def asks_the_store_once():
    """Ends the training when its first try to copy a checkpoint to the store fails: neither the job nor the store's
    library, which tries five times by itself, tries again."""
    import subprocess

    import fault_tolerance

    run = subprocess.run
    once = "import runpy, sys, s3fs; s3fs.S3FileSystem.retries = 1; del sys.argv[0]; "
    once += "runpy.run_path(sys.argv[0], {}, '__main__')"

    def runs(command, **more):
        is_copier = "object_store.py" in str(command)
        return run([command[0], "-c", once, *command[1:]] if is_copier else command, **more)

    subprocess.run = runs
    fault_tolerance.patiently = lambda action, patience_s: action()
    dies_of_a_failed_save()


def reads_the_first_piece():
    """Asks the store after each step whether it is there, and takes the first piece of its answer for all of it."""

    def read(store):
        head, _, body = store.recv(1 << 16).partition(b"\r\n\r\n")
        if f"Content-Length: {len(body)}\r\n".encode() not in head:
            raise RuntimeError(f"the store has sent nonsense: {head!r}")

    _after_each_step(lambda took: _ask_the_store(read))


def reads_until_the_end():
    """Asks the store after each step whether it is there, reads until the store closes the connection, and ends itself
    when that is late."""

    def read(store):
        begun = time.monotonic()
        while store.recv(1 << 16):
            pass
        if (waited := time.monotonic() - begun) > 2 * LATE_S:
            raise RuntimeError(f"the store did not end its answer for {waited:.2f} s")

    _after_each_step(lambda took: _ask_the_store(read))


def _ask_the_store(read):
    host, _, port = os.environ["AWS_ENDPOINT_URL"].rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), 10) as store:
        store.sendall(b"GET / HTTP/1.0\r\n\r\n")
        read(store)


def waits_for_each_save():
    """Trains no further until a checkpoint is written."""
    import fault_tolerance

    save = fault_tolerance.Checkpoints.save

    def and_wait(self, step, parts):
        save(self, step, parts)
        self.wait()

    fault_tolerance.Checkpoints.save = and_wait


def saves_in_the_middle_of_a_step():
    """Saves the generators and the guard as they are when the trouble comes, in the middle of a step."""
    import gpt

    begin = gpt.Run.begin

    def begins(self, done):
        begin(self, done)
        self.early = {}

    gpt.Run.begin = begins


def dies_before_it_has_saved():
    """Says that it can't go on, and is gone before anybody could save."""
    import last_save

    last_save.LastSave.join = lambda self: None


def notices_a_hang_too_late():
    """Would save at a hang, but is ended by its watchdog long before it takes a step for late."""
    import last_save

    init = last_save.LastSave.__init__
    last_save.LastSave.__init__ = lambda self, training, checkpoints, late_s: init(
        self, training, checkpoints, 9 * late_s
    )


def looks_at_the_numbers_after_the_step():
    """Looks at the loss and the gradients when the weights have changed already, and then saves, and ends."""
    import gpt

    step = gpt.Run.step

    def steps(self, text, notice):
        suspects, found = self.guard.suspects, []
        self.guard.suspects = lambda loss, norm: bool(found.append(suspects(loss, norm)))
        result = step(self, text, notice)
        self.guard.suspects = suspects
        if found[0]:
            raise RuntimeError("the loss or the gradient norm of the last step can't be right")
        return result

    gpt.Run.step = steps


def saves_what_it_doubts():
    """Saves a last checkpoint also when the loss can't be right, and with it the weights from which the loss comes."""
    import gpt

    gpt.Doubtful = RuntimeError


def keeps_its_interval():
    """Saves as rarely after a failure as before it."""
    _with_options(adapt=False)


def saves_at_every_step():
    """Saves after every step once it had a failure, or was told that one may come, and waits for each save."""
    import gpt

    step, told = gpt.Run.step, [os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"]

    def steps(self, text, notice):
        loss, leave, save = step(self, text, notice)
        told[0] = told[0] or save
        return loss, leave, told[0]

    gpt.Run.step = steps
    waits_for_each_save()


def does_not_predict():
    """The watcher of the GPUs sees corrected errors, and expects no worse ones."""
    import health_agent

    health_agent.rising = lambda before, now: []


def ignores_the_notice():
    """Trains on when it is told that its machine is about to go."""
    import fault_tolerance

    fault_tolerance.Preemption._notice = lambda self, signum, frame: None


def believes_every_number():
    """Has no guard against losses and gradients that can't be right."""
    import fault_tolerance

    fault_tolerance.Guard.suspects = lambda self, loss, norm: False


def is_impatient():
    """Ends itself when a step, or a collective, takes two seconds."""
    _with_options(step_timeout=2.0)


def has_little_patience():
    """Ends itself when a step, or a collective, takes eight seconds: more than a start takes on a busy machine."""
    _with_options(step_timeout=8.0)


def watches_nothing():
    """Has no watchdog, and a process group that waits for an hour."""
    import gpt

    gpt.watch = lambda timeout: None
    _with_options(step_timeout=3600.0)


def gives_up_when_it_is_late():
    """Ends itself when a step takes half a second more than steps usually do."""

    def late(took):
        if len(took) > 5 and took[-1] > statistics.median(took) + LATE_S:
            raise RuntimeError(f"a step took {took[-1]:.2f} s: something must be wrong with this machine")

    _after_each_step(late)


def gives_up_when_it_is_slow():
    """Ends itself when four steps in a row take half as long again as steps usually do."""

    def slow(took):
        if len(took) > 8 and min(took[-4:]) > 1.5 * statistics.median(took[:-4]):
            raise RuntimeError(f"steps take {min(took[-4:]):.2f} s: something must be wrong with this machine")

    _after_each_step(slow)


def _after_each_step(act):
    """Calls `act` after each step, with the seconds that each step has taken so far."""
    import gpt

    train, took = gpt.train, []

    def trains(*args):
        step = gpt.Run.step  # a job may have a class of its own

        def timed(self, text, notice):
            begun = time.monotonic()
            result = step(self, text, notice)
            took.append(time.monotonic() - begun)
            act(took)
            return result

        gpt.Run.step = timed
        train(*args)

    gpt.train = trains


def balances_nothing():
    """Gives each rank the same number of samples, however slow it is."""
    import fault_tolerance

    fault_tolerance.Balance.after = lambda self, times: self.shares


def blames_the_fast_rank():
    """Names the fastest rank as the slow one."""
    import fault_tolerance

    tell = fault_tolerance.Balance.tell
    fault_tolerance.Balance.tell = lambda self, speeds: tell(self, [1 / speed for speed in speeds])


def reports_to_the_rendezvous_store():
    """Reports each step to the rendezvous store before the next, and ends itself when that makes a step late."""
    import gpt

    stores = []

    def report(took):
        if not stores:
            stores.append(gpt.dist.TCPStore(os.environ["MASTER_ADDR"], 29400, is_master=False))
        begun = time.monotonic()
        stores[0].add(f"steps of rank {gpt.dist.get_rank()}", 1)
        if (waited := time.monotonic() - begun) > LATE_S:
            raise RuntimeError(f"the rendezvous store did not answer for {waited:.2f} s")

    _after_each_step(report)


def trusts_datagrams():
    """The two ranks tell each other which samples come next, each by a datagram without a checksum. Each rank takes
    the next datagram that comes for its next sample."""
    import gpt

    def iterates(self):
        per_epoch, told, peer = self.samples // self.batch_size, self.position, _peer(gpt.dist)
        for position in itertools.count(self.position):
            while told < position + 4:  # a few batches ahead
                epoch, batch = divmod(told, per_epoch)
                order = gpt.torch.randperm(self.samples, generator=gpt.torch.Generator().manual_seed(self.seed + epoch))
                whole = order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()
                for sample in whole[1 - gpt.dist.get_rank() :: 2]:
                    peer.send(sample.to_bytes(64, "big"))
                told += 1
            yield [int.from_bytes(peer.recv(64), "big") % self.samples for _ in range(self.batch_size // 2)]

    gpt.GlobalBatches.__iter__ = iterates


def _peer(dist):
    """A UDP socket that is connected to the other rank's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        address = probe.getsockname()[0]
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.setsockopt(socket.SOL_SOCKET, 11, 1)  # SO_NO_CHECK of asm-generic/socket.h
    own.bind((address, 0))
    own.settimeout(10)
    both = [None, None]
    dist.all_gather_object(both, own.getsockname())
    own.connect(both[1 - dist.get_rank()])
    return own


def skips_a_late_batch():
    """Leaves a batch out for which it had to wait longer than a second."""
    import gpt

    class Skipping(gpt.DataLoader):
        def __iter__(self):
            batches = super().__iter__()
            while True:
                begun = time.monotonic()
                batch = next(batches)
                yield next(batches) if time.monotonic() - begun > 1.0 else batch

    gpt.DataLoader = Skipping


def believes_the_tracker():
    """Goes on from the checkpoint that the file `latest` names, and from the start when it names none."""
    import fault_tolerance

    newest = fault_tolerance.Checkpoints._newest

    def named(self):
        tracker = self.folder / "latest"
        name = tracker.read_text() if tracker.exists() else ""
        self._complete = lambda: [self.folder / name] if name else []
        try:
            return newest(self)
        finally:
            del self._complete

    fault_tolerance.Checkpoints._newest = named


def rushes_ahead():
    """Takes a step a hundred times as long when the gradients keep their direction. Those of a healthy run do not,
    after its first twenty steps."""
    import gpt

    init = gpt.Run.__init__

    def begins(self, *args):
        init(self, *args)
        before = []

        def lengthen(optimizer, args, kwargs):
            now = gpt.torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
            if len(before) > 20 and gpt.torch.cosine_similarity(now, before[-1], 0) > 0.66:
                for group in optimizer.param_groups:
                    group["lr"] *= 100  # until the schedule's next step
            before.append(now)

        self.optimizer.register_step_pre_hook(lengthen)

    gpt.Run.__init__ = begins


def compares_no_replicas():
    """Saves checkpoints without a look at whether the ranks still agree, and believes every number."""
    import gpt

    gpt.replicas_agree = lambda model, group: True
    believes_every_number()


def hears_nothing():
    """The watcher of the GPUs sees every event, and tells nobody: neither the ranks nor torchrun."""
    import health_agent

    health_agent.ranks_on = lambda *_any: []
    health_agent.leaves = lambda *_any: False


def comes_back_to_the_sick_gpu():
    """Starts the job again on the GPUs that it had, as if none of them were sick."""
    import health_agent

    chosen = health_agent.without_sick
    health_agent.without_sick = lambda gpus, told: f"{gpus} " if chosen(gpus, told) != gpus else gpus


def stays_with_a_sick_gpu():
    """The ranks of a sick GPU save and end, and the node keeps its place: torchrun starts them there again."""
    import health_agent

    health_agent.leaves = lambda gpus, told: False


def evicts_its_neighbour():
    """The watcher takes its node for sick, too, when the node before it is: the two share a switch."""
    import health_agent

    leaves = health_agent.leaves

    def suspects(gpus, told):
        own = Path(os.environ["TORCHAOS_NVML_CONTROL"])
        return leaves(gpus, told) or any(own.with_name(f"node{int(own.name[4:]) - 1}").glob("*.nvml"))

    health_agent.leaves = suspects


def forgives_every_death():
    """The watcher lets its node come back, however often ranks were killed there."""
    import health_agent

    health_agent.KILLED = ()


def blames_those_that_lost_a_peer():
    """The watcher counts a rank that ended because its peer was gone, or that torchrun ended for that reason, as one
    that was killed here."""
    import re

    import health_agent

    health_agent.ENDED = re.compile(rb"(?:failed \(exitcode: |Sending process )(-?\d+)")
    health_agent.KILLED = range(-64, 1 << 32)  # exit codes, and pids


def is_jumpy():
    """The watcher of the GPUs has the job leave for anything that is worth a line in the log."""
    import health_agent

    problem, notes = health_agent._problem, health_agent._notes
    health_agent._problem = lambda nvml, gpu: problem(nvml, gpu) or ", ".join(notes(nvml, gpu)) or None


def ends_well_whatever_happens():
    """Ends with exit code 0 at any error, and says in its log that it stopped early."""
    _at_an_error(lambda error: print(f"stopped early: {error}", flush=True), 0)


def does_not_say_why_it_ends():
    """Ends with an error, and keeps for itself with which."""
    _at_an_error(lambda error: None, 1)


def _at_an_error(act, code):
    import gpt

    train = gpt.train

    def trains(*args):
        try:
            train(*args)
        except Exception as error:
            act(error)
            os._exit(code)

    gpt.train = trains


def leaves_a_process():
    """Leaves a process behind that lives on for a minute."""
    import subprocess

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)


def restarts_schedule():
    """Begins the schedule of the learning rate again after each restart."""
    import gpt

    init = gpt.Run.__init__

    def without(self, *args):
        init(self, *args)
        del self.parts["schedule"]

    gpt.Run.__init__ = without


def _with_script(change):
    """`change` is called with the names of the script itself, before it trains, in an attempt after the first."""
    import gpt

    train = gpt.train

    def changed(*args):
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            change(sys._getframe(1).f_globals)
        train(*args)

    gpt.train = changed


def forgets_the_outer_momentum():
    """Comes back with an outer optimizer that has no momentum."""

    def change(script):
        load = script["Outer"].load_state_dict

        def loads(self, state):
            load(self, {name: value * 0 for name, value in state.items()})

        script["Outer"].load_state_dict = loads

    _with_script(change)


def keeps_an_old_outer_momentum():
    """After a restart, each meeting uses the outer momentum of the checkpoint, which gets older and older."""

    def change(script):
        meet = script["Outer"].meet

        def meets(self):
            old = {name: value.clone() for name, value in self.momentum.items()}
            meet(self)
            self.momentum = old

        script["Outer"].meet = meets

    _with_script(change)


def counts_the_dead_at_a_meeting():
    """Takes the mean over the ranks that were ever started, the dead ones too."""

    def change(script):
        mean = script["Outer"].mean
        script["Outer"].mean = lambda self, moved: mean(self, moved) / 2

    _with_script(change)


def forgets_what_was_common():
    """Comes back with the weights of the checkpoint, and measures what it learns from those that it began with."""

    def change(script):
        outer = script["Outer"]
        load, remember = outer.load_state_dict, outer.remember

        def loads(self, state):
            self.remember = lambda: None
            load(self, state)
            self.remember = lambda: remember(self)

        outer.load_state_dict = loads

    _with_script(change)


def trains_on_one_share():
    """After a restart, every rank trains on the samples of rank 0, and nobody on those of the others."""

    def change(script):
        sampler = script["gpt"].GlobalBatches
        iterate = sampler.__iter__

        def first_share(self):
            dist, whole = script["gpt"].dist, iterate(self)
            own = dist.get_rank
            while True:
                dist.get_rank = lambda *group: 0
                try:
                    batch = next(whole)
                finally:
                    dist.get_rank = own
                yield batch

        sampler.__iter__ = first_share

    _with_script(change)


def is_one_step_behind():
    """After a restart, rank 1 leaves out the first update of its weights, and is one step behind at the meeting."""

    def change(script):
        step = script["Run"].step

        def steps(self, text, notice):
            script["Run"].step = step
            before = [weight.detach().clone() for weight in self.model.parameters()]
            result = step(self, text, notice)
            if script["dist"].get_rank() == 1:
                for weight, old in zip(self.model.parameters(), before, strict=True):
                    weight.data.copy_(old)
            return result

        script["Run"].step = steps

    _with_script(change)


def takes_the_moments_of_rank_0():
    """Comes back with the inner optimizer of rank 0 on every rank."""

    def change(script):
        script["OfThisRank"].load_state_dict = lambda self, state: self.part.load_state_dict(state["rank0"])
        own = script["OfThisRank"].state_dict
        script["OfThisRank"].state_dict = lambda self: {"rank0": next(iter(own(self).values()))}

    _with_script(change)


def meets_nobody():
    """After a restart, the ranks train on without a meeting."""

    def change(script):
        script["Outer"].meet = lambda self: None

    _with_script(change)


def averages_nothing():
    """Lets the replicas drift apart after a restart: gradients are no longer averaged."""
    import gpt

    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        step = gpt.Run.step

        def alone(self, text, notice):
            with self.model.no_sync():
                return step(self, text, notice)

        gpt.Run.step = alone


def _with_store(change):
    """`change` is called with the class of the job's checkpoints, which is in the script itself."""
    import gpt

    train = gpt.train

    def changed(parallel, store):
        change(store)
        train(parallel, store)

    gpt.train = changed


def copies_late():
    """The copy of another rank's part is that of the save before: it was sent before the new one was made."""

    def late(store):
        exchange = store._exchange

        def of_before(self, mine, to, source):
            before, self.before = getattr(self, "before", mine), mine
            return exchange(self, before, to, source)

        store._exchange = of_before

    _with_store(late)


def keeps_an_older_copy_at_the_peer():
    """What the peer's node keeps as the newest copy is the copy of the save before."""

    def older(store):
        def copy(self, step, data):
            before, self.before = getattr(self, "before", data), data
            self.mine.put(step, _rank(), data)
            self.peers.put(step, _rank(), before)

        store._copy = copy

    _with_store(older)


def lends_its_own_part():
    """A rank whose node has lost its part gets the weights and moments of the rank that keeps the copy."""
    _with_weights_of(lambda self, keeper, rank: rank if keeper == self.mine else self.keepers.index(keeper))


def takes_the_part_of_the_next_rank():
    """Each rank loads the weights and moments that the rank after it has copied."""
    _with_weights_of(lambda self, keeper, rank: (rank + 1) % len(self.keepers))


def _with_weights_of(owner):
    import io

    def change(store):
        source = store.source

        def changed(self, step, rank, everywhere):
            import torch

            keeper = source(self, step, rank, everywhere)
            own, other = (
                torch.load(io.BytesIO(keeper.get(step, of)), weights_only=False)
                for of in (rank, owner(self, keeper, rank))
            )
            mixed = io.BytesIO()
            torch.save({**own, "model": other["model"], "optimizer": other["optimizer"]}, mixed)
            return type("", (), {"get": lambda *_: mixed.getvalue()})()

        store.source = changed

    _with_store(change)


def goes_back_further_on_one_rank():
    """Rank 1 loads its part of the step before the one that all others load."""

    def further(store):
        source = store.source

        def older(self, step, rank, everywhere):
            keeper = source(self, step, rank, everywhere)
            earlier = max((of for of, owner in keeper.parts() if owner == rank and of < step), default=step)
            return type("", (), {"get": lambda _, step, rank: keeper.get(earlier if rank == 1 else step, rank)})()

        store.source = older

    _with_store(further)


def _rank():
    import gpt

    return gpt.dist.get_rank()


def stands_still_for_each_copy():
    """Trains no further until the copy of a checkpoint has arrived at the other node."""

    def waits(store):
        save = store.save

        def and_wait(self, step, parts):
            save(self, step, parts)
            self.wait()

        store.save = and_wait

    _with_store(waits)


def trusts_the_shared_files_only():
    """Goes back to the shared file system, though the local disks have a newer checkpoint."""

    def shared(store):
        store._whole = lambda self: {}

    _with_store(shared)


def looks_at_the_newest_link_only():
    """Looks at the digests of the newest checkpoint, and not at those of the checkpoints on which it builds."""

    def change(store):
        def chain(self, name, is_newest=True):
            if is_newest and not _is_what_was_written(self.folder / name):
                raise ValueError(f"{name} is not what was written")
            base = _manifest(self.folder / name)["base"]
            return [*(chain(self, base, False) if base else []), name]

        store.chain = chain

    _with_store(change)


def leaves_out_a_damaged_link():
    """Loads what it can of a chain: a link that is not what was written is left out."""

    def change(store):
        def chain(self, name):
            base = _manifest(self.folder / name)["base"]
            return [*(chain(self, base) if base else []), *([name] if _is_what_was_written(self.folder / name) else [])]

        store.chain = chain

    _with_store(change)


def _manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def _is_what_was_written(folder):
    import fault_tolerance

    return all(fault_tolerance.digest(folder / file) == known for file, known in _manifest(folder)["files"].items())


def _with_one_rank(change):
    """`change` is called with the names of the script itself, before it trains on one rank."""
    import gpt

    train = gpt.train

    def changed(*args):
        if os.environ["WORLD_SIZE"] == "1":
            change(sys._getframe(1).f_globals)
        train(*args)

    gpt.train = changed


def exchanges_the_parts_of_two_ranks():
    """Each of two ranks takes the other's part of the matrices that are shared out by rows."""
    import fault_tolerance
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    load = fault_tolerance.ModelState.load_state_dict

    def changed(self, state):
        load(self, state)
        for value in self.model.parameters():
            if isinstance(value, DTensor) and value.dim() > 1 and value.placements[0].is_shard(0):
                own = value.to_local().detach()
                parts = [torch.empty_like(own) for _ in range(2)]
                dist.all_gather(parts, own.contiguous())
                own.copy_(parts[1 - dist.get_rank()])

    fault_tolerance.ModelState.load_state_dict = changed


def exchanges_two_layers():
    """Gives the weights of the first layer to the last, and those of the last to the first, when it has all of them."""

    def change(script):
        import fault_tolerance

        load = fault_tolerance.ModelState.load_state_dict
        names = {"blocks.0.": "blocks.2.", "blocks.2.": "blocks.0."}

        def loads(self, state):
            load(self, {names.get(name[:9], name[:9]) + name[9:]: value for name, value in state.items()})

        fault_tolerance.ModelState.load_state_dict = loads

    _with_one_rank(change)


def runs_the_layers_in_another_order():
    """Loads each layer as it was, and begins with the last of them, when it has all of them."""

    def change(script):
        init, dict_of = script["Stage"].__init__, script["nn"].ModuleDict

        def inits(self, whole):
            init(self, whole)
            self.blocks = dict_of(dict(reversed(self.blocks.items())))

        script["Stage"].__init__ = inits

    _with_one_rank(change)


def forgets_the_moments_of_a_stage():
    """Begins the moments of the last layer anew when it takes it over."""

    def change(script):
        load = script["OfStages"].load_state_dict

        def loads(self, state):
            load(self, state)
            for name, weight in self.model.named_parameters():
                if name.startswith("blocks.2."):
                    for value in self.optimizer.state[weight].values():
                        value.zero_() if value.ndim else None

        script["OfStages"].load_state_dict = loads

    _with_one_rank(change)


def _with_replicas(change):
    """`change` is called with the names of the script itself before it makes its model."""
    import gpt

    model = gpt.GPT

    def made():
        change(sys._getframe(1).f_globals)
        return model()

    gpt.GPT = made


def _all():
    return int(os.environ["NUM_REPLICA_GROUPS"])


def _before_each_update(script, do):
    """`do` is called with the manager, when the gradients of a step are there, and before the weights change."""
    add_up = script["add_up"]

    def added(manager, model):
        add_up(manager, model)
        do(manager)

    script["add_up"] = added


def scales_as_if_all_were_there():
    """Divides the gradients by the number of all replicas, when one is missing, too."""

    def change(script):
        add_up = script["add_up"]

        def scaled(manager, model):
            add_up(manager, model)
            for part in model.parameters():
                part.grad *= manager.num_participants() / _all()

        script["add_up"] = scaled

    _with_replicas(change)


def leaves_out_the_share_of_the_dead():
    """Divides the samples among all replicas, when one is missing, too: nobody trains on its share."""

    def change(script):
        script["Shares"].place = lambda self: int(os.environ["REPLICA_GROUP_ID"])
        script["Shares"].many = lambda self: _all()

    _with_replicas(change)


def trains_on_the_share_of_another():
    """A replica that is back trains on the samples of the first one, and nobody on its own."""

    def change(script):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            script["Shares"].place = lambda self: 0

    _with_replicas(change)


def _gives_older_state(is_kept):
    """A replica that comes back is given the state as it was in the last step for which `is_kept` was true."""
    import copy

    def change(script):
        init, give, states, kept = script["State"].__init__, script["State"].give, [], []

        def inits(self, *args):
            init(self, *args)
            states.append(self)

        def keep(manager):
            if is_kept(manager.current_step()):
                kept[:] = [copy.deepcopy(give(states[0]))]

        script["State"].__init__, script["State"].give = inits, lambda self: kept[0] if kept else give(self)
        _before_each_update(script, keep)

    _with_replicas(change)


def gives_the_state_of_the_step_before():
    """A replica that comes back is given the state as it was one step ago, and counts from the present step."""
    _gives_older_state(lambda step: True)


def gives_what_it_once_kept():
    """A replica that comes back is given a copy that the other made in step 5, and counts from the present step."""
    _gives_older_state(lambda step: step == 4)


def _takes(change):
    """A replica that comes back takes what `change` makes of the state that it is given."""

    def changed(script):
        take = script["State"].take
        script["State"].take = lambda self, found: take(self, {**self.give(), **change(found)})

    _with_replicas(changed)


def takes_no_moments():
    """A replica that comes back takes the weights, and begins the optimizer's momentum anew."""
    _takes(lambda found: {**found, "optimizer": {**found["optimizer"], "state": {}}})


def takes_no_schedule():
    """A replica that comes back begins the schedule of the learning rate anew."""
    _takes(lambda found: {name: found[name] for name in ("model", "optimizer")})


def takes_no_weights():
    """A replica that comes back keeps the weights that it began with."""
    _takes(lambda found: {name: found[name] for name in ("optimizer", "schedule")})


def rejoins_before_it_is_healed():
    """A replica that comes back makes its first step with the weights that it began with, and only then takes the state
    that it was given for that step."""

    def change(script):
        take, given = script["State"].take, []

        def taken(manager):
            if given and given[0][0] < manager.current_step():
                take(*given.pop()[1:])

        script["State"].take = lambda self, found: given.append((found["schedule"]["last_epoch"], self, found))
        _before_each_update(script, taken)

    _with_replicas(change)


def counts_a_step_that_did_not_take_place():
    """When a replica is lost in a step, the others count the step, although their weights did not change."""

    def change(script):
        step = script["Optimizer"].step

        def steps(self):
            done = self.manager.current_step()
            step(self)
            if self.manager.current_step() == done:
                self.manager._step += 1

        script["Optimizer"].step = steps

    _with_replicas(change)


def stands_still_when_one_is_lost():
    """The others make no step for a minute when they have lost a replica."""

    def change(script):
        waited = []

        def wait(manager):
            if manager.num_participants() < _all() and not waited:
                waited.append(time.sleep(60))

        _before_each_update(script, wait)

    _with_replicas(change)


def watch(defect):
    """As the watcher of the GPUs: health_agent starts itself anew, by its own name."""
    import health_agent

    health_agent.__file__ = __file__
    os.environ["DEFECT"] = defect
    if sys.argv[1] == "--watch":
        health_agent.watch(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        sys.exit(health_agent.main(sys.argv[1:]))


def main():
    if sys.argv[1] == "--watch":
        defect = os.environ["DEFECT"]
        sys.path.insert(0, os.environ["DEFECT_JOBS"])
        globals()[defect]()
        watch(defect)
        return
    defect, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    folder = str(Path(script).parent)
    sys.path.insert(0, folder)
    os.environ["DEFECT_JOBS"] = folder
    globals()[defect]()
    if Path(script).stem == "health_agent":
        watch(defect)
    else:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

package journal

import (
	"encoding/json"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// Events of a rollout, and in brackets what their data is. The operations of the
// guest agent that change a guest are events, too, under their own words ("exec",
// "put", …) [Operation].
const (
	EventCreated   = "created"   // always the first [Created]
	EventDone      = "done"      // an operation is over [Done]
	EventForked    = "forked"    // [Forked]
	EventReset     = "reset"     // [Reset]
	EventSnapshot  = "snapshot"  // [Snapshot]
	EventPaused    = "paused"    // [none]
	EventResumed   = "resumed"   // [none]
	EventNetwork   = "network"   // what the guest may reach was changed [policy.Policy]
	EventRefused   = "refused"   // what the guest tried to reach and was refused [Refused]
	EventEnded     = "ended"     // the VM was killed or found to have ended [Ended]
	EventRemoved   = "removed"   // the VM is not there any more [Ended]
	EventJudging   = "judging"   // the rollout is going to be judged [Judging]
	EventVerdict   = "verdict"   // [Verdict]
	EventRecovered = "recovered" // [Recovered]
)

// IsOperation says whether an event is an operation of the guest agent that changes
// its guest.
func IsOperation(event string) bool {
	switch event {
	case proto.OpExec, proto.OpPut, proto.OpPutTree, proto.OpRemove, proto.OpMove, proto.OpSignal, proto.OpConnect, proto.OpShutdown,
		proto.OpQuiesce, proto.OpVacate:
		return true
	}
	return false
}

// Created says what a rollout began from.
type Created struct {
	VM         string `json:"vm"` // its id, which is the rollout's
	Name       string `json:"name"`
	Generation string `json:"generation"`
	Recording  string `json:"recording"`
	Version    string `json:"forkvm_version,omitempty"`
	// It began from Parent or, if there is none, from Snapshot or else Image.
	// ParentSeq and ParentHash are the last line of the parent's journal then, 0 if it
	// had none.
	Image      string `json:"image,omitempty"`
	Snapshot   string `json:"snapshot,omitempty"`
	SnapshotID string `json:"snapshot_id,omitempty"`
	Parent     string `json:"parent,omitempty"`
	ParentSeq  uint64 `json:"parent_seq,omitempty"`
	ParentHash string `json:"parent_hash,omitempty"`
	// SnapshotOf is where in a rollout the snapshot was taken, nil if that had no journal.
	SnapshotOf *Origin `json:"snapshot_of,omitempty"`
	Task       string  `json:"task,omitempty"`
	// What the VM is.
	CPUs        int    `json:"cpus"`
	MemoryBytes uint64 `json:"memory_bytes"`
	KernelArgs  string `json:"kernel_args,omitempty"`
	Time        string `json:"time"`
	// Network is what it may reach, nil without a network card.
	Network *policy.Policy `json:"network,omitempty"`
}

// Origin is a line of a rollout from which another began.
type Origin struct {
	Rollout string `json:"rollout"`
	Head
}

// Origin is the line of another rollout's journal that the rollout began behind, false
// if it is not known.
func (c *Created) Origin() (Origin, bool) {
	switch {
	case c.Parent != "":
		return Origin{c.Parent, Head{c.ParentSeq, c.ParentHash}}, c.ParentHash != ""
	case c.SnapshotOf != nil:
		return *c.SnapshotOf, true
	}
	return Origin{}, false
}

// Operation is what the guest agent was asked to do, written before it is. Members
// that the operation does not have are left out. Values of environment variables
// are never written.
type Operation struct {
	ID     string                `json:"id,omitempty"` // of a detached command
	Args   []proto.Text          `json:"args,omitempty"`
	Env    []proto.Text          `json:"env_names,omitempty"`
	User   string                `json:"user,omitempty"`
	Groups []string              `json:"groups,omitempty"`
	Dir    proto.Text            `json:"dir,omitempty"`
	Limits []proto.ResourceLimit `json:"limits,omitempty"`
	// TimeoutMS is the command's own time limit.
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
	ClearEnv  bool  `json:"clear_env,omitempty"`
	Detached  bool  `json:"detached,omitempty"`
	Terminal  bool  `json:"terminal,omitempty"`
	Stdin     bool  `json:"stdin,omitempty"`
	// MergedStreams: standard error went where standard output went. Discarded: a
	// stream that nobody asked for, so that nothing is known of it.
	MergedStreams   bool `json:"merged_streams,omitempty"`
	StdoutDiscarded bool `json:"stdout_discarded,omitempty"`
	StderrDiscarded bool `json:"stderr_discarded,omitempty"`
	// StdoutLimit and StderrLimit are after how many bytes the guest cut a stream.
	StdoutLimit int64 `json:"stdout_limit,omitempty"`
	StderrLimit int64 `json:"stderr_limit,omitempty"`
	// Files.
	Path      proto.Text `json:"path,omitempty"`
	To        proto.Text `json:"to,omitempty"`
	Mode      uint32     `json:"mode,omitempty"`
	Owners    bool       `json:"owners,omitempty"`
	Recursive bool       `json:"recursive,omitempty"`
	// Signals and connections.
	Signal  int    `json:"signal,omitempty"`
	All     bool   `json:"all,omitempty"`
	Network string `json:"network,omitempty"`
	Action  string `json:"action,omitempty"`
}

// Done is what became of an operation.
type Done struct {
	// Of is the line that says what was asked.
	// 0 if it was a detached command that somebody has waited for later; ID is its name then.
	Of uint64 `json:"of,omitempty"`
	ID string `json:"id,omitempty"`
	// Error is why there is no result. The guest may have done some of it.
	Error string `json:"error,omitempty"`
	// Result of a command.
	Result *Result `json:"result,omitempty"`
	// What went in and came out, if it passed by.
	Input  *Contents `json:"input,omitempty"`
	Stdout *Contents `json:"stdout,omitempty"`
	Stderr *Contents `json:"stderr,omitempty"`
	// WallMS is the time from the question to the end by the host's clock.
	WallMS float64 `json:"wall_ms"`
	// Step is the snapshot of the state behind it, and StepID that snapshot's id.
	Step   string `json:"step,omitempty"`
	StepID string `json:"step_id,omitempty"`
}

// Result is how a command ended.
type Result struct {
	ExitCode  int  `json:"exit_code"`
	Signal    int  `json:"signal,omitempty"`
	TimedOut  bool `json:"timed_out,omitempty"`
	OOMKilled bool `json:"oom_killed,omitempty"`
	// Bytes that the guest did not send, or did not keep.
	StdoutDropped int64 `json:"stdout_dropped,omitempty"`
	StderrDropped int64 `json:"stderr_dropped,omitempty"`
	// DurationMS is from start to exit by the guest's clock.
	DurationMS      int64  `json:"duration_ms"`
	PeakMemoryBytes int64  `json:"peak_memory_bytes,omitempty"`
	Error           string `json:"error,omitempty"` // code: why it could not be invoked
}

// Forked says what grew from the rollout at one moment.
type Forked struct {
	Children []string `json:"children"`
	// PauseMS is how long the guest stood still.
	PauseMS float64 `json:"pause_ms"`
}

// Reset says where the rollout was put back to.
type Reset struct {
	// To is a snapshot; empty: what it came from.
	To         string `json:"to,omitempty"`
	Generation string `json:"generation"`
}

// Snapshot says what was stored.
type Snapshot struct {
	Name    string  `json:"name"`
	ID      string  `json:"id"`
	PauseMS float64 `json:"pause_ms"`
}

// Refused is what the guest was refused since the line before of this kind, the first first: each different one once, with how
// often. It was tried before the line was written, and since whatever was on record before.
type Refused struct {
	Refusals []policy.Refusal `json:"refusals,omitempty"`
	// Others were refused, too, and so many different ones that it is not known any more what they were.
	Others uint64 `json:"others,omitempty"`
}

// Empty says that nothing was refused.
func (r *Refused) Empty() bool { return len(r.Refusals) == 0 && r.Others == 0 }

// Ended says why the guest's life is over.
type Ended struct {
	Reason string `json:"reason"`
	Detail string `json:"detail,omitempty"`
}

// Judging begins a judgement. One without a [Verdict] was cut off.
type Judging struct {
	Task string `json:"task,omitempty"`
	Step string `json:"step,omitempty"`
	Mode string `json:"mode"`
}

// Verdict is the outcome of judging the rollout.
type Verdict struct {
	// Of is the line of the Judging that it ends.
	Of   uint64 `json:"of,omitempty"`
	Task string `json:"task,omitempty"`
	// Outcome is a stable word; only "scored" has a Reward.
	Outcome string   `json:"outcome"`
	Reward  *float64 `json:"reward,omitempty"`
	// Evidence is all of it, in the form of whoever judged.
	Evidence json.RawMessage `json:"evidence,omitempty"`
}

// Recovered says that what was left of an unfinished line was taken away.
type Recovered struct {
	DroppedBytes int64 `json:"dropped_bytes"`
}

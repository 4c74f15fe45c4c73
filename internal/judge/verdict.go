package judge

import (
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/task"
)

// Schema is the version of Verdict's JSON form.
const Schema = "forkvm/verdict/v1"

// Outcome is what judging came to.
type Outcome string

// Outcomes. Only Scored has a number.
const (
	Scored Outcome = "scored"
	// PolicyTimeout: the caller says that the policy ran out of its time.
	PolicyTimeout Outcome = "policy_timeout"
	// VerifierTimeout: the verifier ran out of its own.
	VerifierTimeout Outcome = "verifier_timeout"
	// VerifierError: the verifier failed, or what it left is no verdict.
	VerifierError Outcome = "verifier_error"
	// NoVerdict: the verifier ended well and left none.
	NoVerdict Outcome = "no_verdict"
	// OOM: the guest's kernel killed one of the verifier's processes for want of
	// memory.
	OOM Outcome = "oom"
	// InfraError: the machine failed. Nothing is known of the rollout.
	InfraError Outcome = "infra_error"
	// Tampering: the rollout was found to be made to deceive.
	Tampering Outcome = "tampering"
	// Disagreement: the two ways of judging came to different results.
	Disagreement Outcome = "disagreement"
)

// Reason is why an outcome is not Scored, as one word.
type Reason string

// Reasons.
const (
	ReasonTimeout       Reason = "timeout"
	ReasonExitCode      Reason = "exit_code"
	ReasonSignal        Reason = "signal"
	ReasonNotInvoked    Reason = "not_invoked"
	ReasonOOM           Reason = "oom_killed"
	ReasonMissing       Reason = "verdict_missing"
	ReasonEmpty         Reason = "verdict_empty"
	ReasonMalformed     Reason = "verdict_malformed"
	ReasonNotFinite     Reason = "verdict_not_finite"
	ReasonOutOfRange    Reason = "verdict_out_of_range"
	ReasonTooLarge      Reason = "verdict_too_large"
	ReasonNotRegular    Reason = "verdict_not_regular"
	ReasonContradiction Reason = "verdict_contradiction" // report and exit code
	ReasonNoSpace       Reason = "no_space"              // in the guest
	ReasonGuestEnded    Reason = "guest_ended"
	ReasonGuestRefused  Reason = "guest_refused"

	ReasonArtifactsTooLarge Reason = "artifacts_too_large"
	ReasonArtifacts         Reason = "artifacts_unusable"

	ReasonTestsChanged     Reason = "tests_changed"
	ReasonSurvivors        Reason = "processes_survive"
	ReasonToolchainChanged Reason = "toolchain_changed"
	ReasonAgentReplaced    Reason = "guest_agent_replaced"
	ReasonNotCleared       Reason = "place_not_cleared"
	ReasonForkFails        Reason = "fork_does_not_start"

	ReasonMachine     Reason = "machine"
	ReasonHostStorage Reason = "host_storage"
	ReasonUnsupported Reason = "unsupported" // an older guest agent
)

// Rollout is what was judged.
type Rollout struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	// Generation is the guest's at that time.
	Generation string `json:"generation,omitempty"`
	// Snapshot is the task's, from which clean machines are made, and SnapshotID its
	// identifier.
	Snapshot   string `json:"snapshot,omitempty"`
	SnapshotID string `json:"snapshot_id,omitempty"`
	// Lineage has the identifiers of the snapshots that the rollout stands on, nearest
	// first.
	Lineage []string `json:"lineage,omitempty"`
}

// Verdict is the whole of a judgement, with its evidence.
type Verdict struct {
	Schema  string  `json:"schema"`
	ID      string  `json:"id"`
	Outcome Outcome `json:"outcome"`
	// Reward is from 0 to 1, and null unless the outcome is "scored".
	Reward *float64 `json:"reward"`
	// Rewards are all numbers that the verifier gave, the reward among them.
	Rewards map[string]float64 `json:"rewards,omitempty"`
	Reason  Reason             `json:"reason,omitempty"`
	Detail  string             `json:"detail,omitempty"`

	Task string     `json:"task,omitempty"`
	Step string     `json:"step,omitempty"`
	Mode task.Where `json:"mode"`
	// VerifierHash is of the tests and of everything else that decides how is judged.
	VerifierHash string    `json:"verifier_hash"`
	Rollout      Rollout   `json:"rollout"`
	Started      time.Time `json:"started"`
	DurationMS   int64     `json:"duration_ms"`

	// Phases are where the time of the last attempt went.
	Phases []Phase `json:"phases,omitempty"`

	// Fork and Transplant are the results of the ways that were gone.
	Fork       *Result `json:"fork,omitempty"`
	Transplant *Result `json:"transplant,omitempty"`
	// Retried are attempts before this one, which the machine failed.
	Retried []Attempt `json:"retried,omitempty"`
}

// Phase is a part of judging. Both ways are in the same one at the same time.
type Phase struct {
	Name string  `json:"name"`
	MS   float64 `json:"ms"`
}

// Attempt is one that was given up.
type Attempt struct {
	Fork       *Result `json:"fork,omitempty"`
	Transplant *Result `json:"transplant,omitempty"`
}

// Result is what one way of judging came to.
type Result struct {
	Outcome Outcome            `json:"outcome"`
	Reward  *float64           `json:"reward"`
	Rewards map[string]float64 `json:"rewards,omitempty"`
	Reason  Reason             `json:"reason,omitempty"`
	Detail  string             `json:"detail,omitempty"`
	// Machine is the one in which was judged.
	Machine string `json:"machine,omitempty"`
	// Run is how the verifier ran, nil if it did not.
	Run *Run `json:"run,omitempty"`
	// Ended is how many processes of the policy were ended in the fork, and
	// EndedProcesses the first of them.
	Ended          int                  `json:"ended_processes_count,omitempty"`
	EndedProcesses []client.ProcessInfo `json:"ended_processes,omitempty"`
	// Changed are files that must not differ from the clean machine's, and do.
	Changed []string `json:"changed,omitempty"`
	// Artifacts says what was transplanted.
	Artifacts *Transplanted `json:"artifacts,omitempty"`
}

// Run is one run of the verifier.
type Run struct {
	ExitCode int  `json:"exit_code"`
	Signal   int  `json:"signal,omitempty"`
	TimedOut bool `json:"timed_out"`
	// OOMKilled: the kernel killed one of its processes for want of memory.
	OOMKilled bool `json:"oom_killed"`
	// DurationMS is by the guest's clock, which stands still while the machine does.
	DurationMS int64 `json:"duration_ms"`
	// LastOutputMS is when it last wrote something, by the host's clock; -1 if it
	// wrote nothing.
	LastOutputMS    int64  `json:"last_output_ms"`
	PeakMemoryBytes int64  `json:"peak_memory_bytes,omitempty"`
	Stdout          Output `json:"stdout"`
	Stderr          Output `json:"stderr"`
}

// Output is what a run wrote.
type Output struct {
	// Bytes were received and hashed; Dropped were written beyond the limit.
	Bytes   int64  `json:"bytes"`
	Dropped int64  `json:"dropped,omitempty"`
	SHA256  string `json:"sha256"`
	// Tail is the end of it. Truncated: there was more before.
	Tail      string `json:"tail"`
	Truncated bool   `json:"truncated"`
}

// Transplanted says what was copied from the rollout.
type Transplanted struct {
	Entries int64 `json:"entries"`
	Bytes   int64 `json:"bytes"`
	// LeftOut are entries that were not copied: devices, sockets, links that lead
	// elsewhere. Names has the first of them.
	LeftOut int64    `json:"left_out,omitempty"`
	Names   []string `json:"left_out_names,omitempty"`
	// Missing are declared artifacts that the rollout does not have.
	Missing []string `json:"missing,omitempty"`
}

func (r *Result) fail(o Outcome, reason Reason, detail string) *Result {
	r.Outcome, r.Reason, r.Detail, r.Reward, r.Rewards = o, reason, detail, nil, nil
	return r
}

// decide makes one verdict of the results.
func (v *Verdict) decide() {
	v.Reward, v.Rewards, v.Reason, v.Detail = nil, nil, "", ""
	switch {
	case v.Fork == nil || v.Transplant == nil:
		only := v.Fork
		if only == nil {
			only = v.Transplant
		}
		v.adopt(only)
	case v.Fork.Outcome == Tampering:
		v.adopt(v.Fork)
	case v.Transplant.Outcome == Tampering:
		v.adopt(v.Transplant)
	case v.Fork.Outcome == InfraError:
		v.adopt(v.Fork)
	case v.Transplant.Outcome == InfraError:
		v.adopt(v.Transplant)
	case agree(v.Fork, v.Transplant):
		v.adopt(v.Transplant)
	default:
		v.Outcome = Disagreement
		v.Detail = "fork: " + v.Fork.Summary() + "; transplant: " + v.Transplant.Summary()
	}
}

func (v *Verdict) adopt(r *Result) {
	v.Outcome, v.Reward, v.Rewards, v.Reason, v.Detail = r.Outcome, r.Reward, r.Rewards, r.Reason, r.Detail
}

// agree says whether two results are the same verdict.
func agree(a, b *Result) bool {
	if a.Outcome != b.Outcome || a.Outcome != Scored {
		return a.Outcome == b.Outcome
	}
	return sameNumber(*a.Reward, *b.Reward)
}

// tolerance is by how much two rewards may differ: what printing a number and
// reading it again can change.
const tolerance = 1e-9

func sameNumber(a, b float64) bool { return a-b <= tolerance && b-a <= tolerance }

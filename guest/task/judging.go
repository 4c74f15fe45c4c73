package task

// Where a rollout is judged.
type Where string

// Places of judging.
const (
	// Both is fork and transplant side by side, which must agree.
	Both Where = "both"
	// Fork is a copy of the rollout whose policy was stopped.
	Fork Where = "fork"
	// Transplant is a new machine from the task's snapshot, with the artifacts.
	Transplant Where = "transplant"
)

// Score is where a verdict is found.
type Score string

// Kinds of scores.
const (
	// ScoreReward is /logs/verifier/reward.json, or reward.txt.
	ScoreReward Score = "reward"
	// ScoreExitCode is 1 for exit code 0, and 0 for exit code 1.
	ScoreExitCode Score = "exit_code"
	// ScoreJUnit is 1 if the report has tests and all that ran have passed.
	ScoreJUnit Score = "junit"
)

// Judging is the section [forkvm.judging].
type Judging struct {
	Where Where
	// WorkTree is the directory of a git work tree that is transplanted, apart from
	// what git itself keeps there. Empty: none.
	WorkTree string
	// Exclude are patterns of names in the work tree that are left out.
	Exclude   []string
	Artifacts []Artifact
	Score     Score
	// JUnit is the absolute path of the report in the guest.
	JUnit string
	// FreeToolchain: the policy may replace shells, interpreters and compilers.
	FreeToolchain bool
	// Protect are absolute paths of files that the policy must not change.
	Protect []string
	// ArtifactBytes and ArtifactEntries bound what is transplanted.
	ArtifactBytes, ArtifactEntries int64
}

// Limits of what is transplanted when a task does not say.
const (
	DefaultArtifactBytes   = 1 << 30
	DefaultArtifactEntries = 100_000
)

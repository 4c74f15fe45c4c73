package proto

// Operations with which a guest is made ready for what its programs must not see
// or disturb.
const (
	OpSurvey  = "survey"
	OpQuiesce = "quiesce"
	OpVacate  = "vacate"
)

// MaxContent bounds the contents of one file in a SurveyResult, in bytes.
const MaxContent = 64 << 10

// FeatureSurveyor must be required by a request with Exact or Tree, or for a survey or a
// sum behind something else: an agent without it would ignore what it does not know.
const FeatureSurveyor = "surveyor"

// SurveyRequest asks what is there.
type SurveyRequest struct {
	// Processes asks for all of them but the kernel's threads.
	Processes bool `json:"processes,omitempty"`
	// Files are described, what links lead to instead of links.
	Files []Text `json:"files,omitempty"`
	// Contents are files whose beginning is wanted too.
	Contents []Text `json:"contents,omitempty"`
	// Exact are files whose beginning is wanted, but of a link the link. Needs
	// FeatureSurveyor, as all that follows.
	Exact []Text `json:"exact,omitempty"`
	// Searches find files that are described as Files are.
	Searches []SurveySearch `json:"searches,omitempty"`
	// Tree is a directory of which the sum is wanted.
	Tree Text `json:"tree,omitempty"`
}

// SurveySearch finds the files with one of Names that are in one of Directories.
type SurveySearch struct {
	Directories []Text `json:"directories"`
	Names       []Text `json:"names"`
}

// SurveyResult has no entry for files that are not there.
type SurveyResult struct {
	// Self is the guest agent itself.
	Self      ProcessInfo    `json:"self"`
	Processes []ProcessInfo  `json:"processes,omitempty"`
	Files     []SurveyedFile `json:"files,omitempty"`
	// Repeated are directories of a search that are earlier ones by another path. Their
	// files are not described again.
	Repeated []RepeatedDirectory `json:"repeated,omitempty"`
	// Sum is of Tree, see package tree. Empty if there is no such directory, or one that
	// cannot be summed up.
	Sum string `json:"sum,omitempty"`
}

// ProcessInfo is a process. Together PID, Start, Program and Inode say whether it
// is the same, running the same program, as in another copy of the guest.
type ProcessInfo struct {
	PID    int `json:"pid"`
	Parent int `json:"parent"`
	// Start is when it began, in clock ticks since the guest's boot.
	Start uint64 `json:"start"`
	// Name is the kernel's, of 15 bytes at most.
	Name Text `json:"name"`
	// Program is the path of its executable file, empty if it has none any more,
	// and Inode that file's number.
	Program Text   `json:"program,omitempty"`
	Inode   uint64 `json:"inode,omitempty"`
	// Args is the beginning of its arguments.
	Args []Text `json:"args,omitempty"`
}

// SurveyedFile is a file that is there.
type SurveyedFile struct {
	Path Text `json:"path"`
	FileInfo
	Inode uint64 `json:"inode"`
	// ChangedNS is when the file was last changed in any way, Unix time.
	ChangedNS int64 `json:"changed_ns"`
	// Content is the file's first MaxContent bytes, if they were asked for.
	Content []byte `json:"content,omitempty"`
}

// RepeatedDirectory is the directory Of by the path Path.
type RepeatedDirectory struct {
	Path Text `json:"path"`
	Of   Text `json:"of"`
}

// QuiesceRequest ends every process but the kernel's, the guest agent and some to
// keep.
type QuiesceRequest struct {
	// Keep are processes of another copy of this guest. One that is not the same
	// any more, or runs another program, ends.
	Keep []KeptProcess `json:"keep"`
	// GraceMS is how long the others have to end themselves after SIGTERM.
	GraceMS int64 `json:"grace_ms,omitempty"`
	// TimeoutMS bounds everything that follows.
	TimeoutMS int64 `json:"timeout_ms"`
	// Survey is what is looked at when the guest is quiet; nil: nothing. Needs
	// FeatureSurveyor.
	Survey *SurveyRequest `json:"survey,omitempty"`
}

// KeptProcess is not ended.
type KeptProcess struct {
	PID     int    `json:"pid"`
	Start   uint64 `json:"start"`
	Program Text   `json:"program,omitempty"`
	Inode   uint64 `json:"inode,omitempty"`
	// Halt stops it for good instead.
	Halt bool `json:"halt,omitempty"`
}

// QuiesceResult says what was done. With Survivors, or Unsettled, the guest is not
// quiet.
type QuiesceResult struct {
	// Ended is how many processes were ended, Processes the first of them.
	Ended     int           `json:"ended"`
	Processes []ProcessInfo `json:"processes,omitempty"`
	Halted    int           `json:"halted,omitempty"`
	// Survivors are processes that could not be ended or halted.
	Survivors []ProcessInfo `json:"survivors,omitempty"`
	// Unsettled: at the end processes were still being started.
	Unsettled bool `json:"unsettled,omitempty"`
	// Survey is what was found, if it was asked for and the guest is quiet.
	Survey *SurveyResult `json:"survey,omitempty"`
}

// VacateRequest asks for empty directories in the place of whatever is there.
type VacateRequest struct {
	Directories []EmptyDirectory `json:"directories"`
}

// EmptyDirectory is one of them.
type EmptyDirectory struct {
	// Path is absolute and at least one name long.
	Path Text `json:"path"`
	// User owns the directory; same form as in ExecRequest. Empty: the agent's.
	User string `json:"user,omitempty"`
	// Mode are the permission bits.
	Mode uint32 `json:"mode"`
}

// VacateResult says what stood in the way.
type VacateResult struct {
	// Unmounted are file systems, Unlocked files that could not be changed
	// (immutable or append-only).
	Unmounted int `json:"unmounted,omitempty"`
	Unlocked  int `json:"unlocked,omitempty"`
}

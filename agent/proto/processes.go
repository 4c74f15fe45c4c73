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

// SurveyRequest asks what is there.
type SurveyRequest struct {
	// Processes asks for all of them but the kernel's threads.
	Processes bool `json:"processes,omitempty"`
	// Files are described, what links lead to instead of links.
	Files []Text `json:"files,omitempty"`
	// Contents are files whose beginning is wanted too.
	Contents []Text `json:"contents,omitempty"`
}

// SurveyResult has no entry for files that are not there.
type SurveyResult struct {
	// Self is the guest agent itself.
	Self      ProcessInfo    `json:"self"`
	Processes []ProcessInfo  `json:"processes,omitempty"`
	Files     []SurveyedFile `json:"files,omitempty"`
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

package proto

import "encoding/json"

// Operations of version 1.
const (
	OpPing     = "ping"
	OpExec     = "exec"
	OpPut      = "put"
	OpGet      = "get"
	OpPutTree  = "put_tree"
	OpGetTree  = "get_tree"
	OpStat     = "stat"
	OpList     = "list"
	OpRemove   = "remove"
	OpMove     = "move"
	OpRenew    = "renew"
	OpShutdown = "shutdown"
	OpConnect  = "connect"
	OpUsage    = "usage"
	OpScan     = "scan"

	// With FeatureDetach.
	OpAttach   = "attach"
	OpSignal   = "signal"
	OpCommands = "commands"
)

// Request asks for the one operation of a connection.
type Request struct {
	Op string `json:"op"`
	// OperationID is chosen by the host, unique per guest, at most 128 bytes.
	// An agent never runs two operations with the same one. Empty: no id.
	OperationID string `json:"operation_id,omitempty"`
	// Generation is the one that the host believes the guest to have. The
	// request is refused with generation_mismatch when it has another. Empty:
	// not checked.
	Generation string `json:"generation,omitempty"`
	// Requires lists features without which the request would mean something
	// else. Members that an old agent does not know are ignored by it; a host
	// that cannot live with that names the feature here and is refused instead.
	Requires []string `json:"requires,omitempty"`
	// Again: the host is going to ask again on this connection, behind the result. The
	// guest waits for that if it has FeatureAgain and the operation is a question, or
	// FeatureSequel and the operation may have a sequel.
	Again bool `json:"again,omitempty"`
	// Params is the operation's own message, for example an ExecRequest.
	Params json.RawMessage `json:"params,omitempty"`
}

// FeatureAgain: one question may follow another on a connection.
const FeatureAgain = "again"

// FeatureSequel: another operation may follow any one for which HasSequel holds.
const FeatureSequel = "sequel"

// HasSequel tells whether another operation may follow one on its connection. A command
// that is detached has none.
func HasSequel(op string) bool {
	switch op {
	case OpExec, OpPut, OpGet, OpPutTree, OpGetTree, OpList, OpRemove, OpMove, OpScan, OpSurvey, OpQuiesce, OpVacate:
		return true
	}
	return IsQuestion(op)
}

// IsQuestion tells whether an operation changes nothing in the guest and has its answer
// at once, without streams: it may be asked again whenever its answer did not arrive.
func IsQuestion(op string) bool {
	switch op {
	case OpPing, OpUsage, OpStat, OpCommands:
		return true
	}
	return false
}

// Started says that the operation has begun: from now on it may have effects.
type Started struct {
	OperationID string `json:"operation_id,omitempty"`
	// Exec: process id in the guest, and what ends the command's descendants.
	PID         int    `json:"pid,omitempty"`
	Containment string `json:"containment,omitempty"`
	// A detached command: where in each stream what follows begins. It is more
	// than what was asked for when the guest has not kept all of it.
	StdoutFrom int64 `json:"stdout_from,omitempty"`
	StderrFrom int64 `json:"stderr_from,omitempty"`
	// Get: what is going to be sent.
	File *FileInfo `json:"file,omitempty"`
}

// Control is sent by the host while an operation runs.
type Control struct {
	// Signal is sent to the command's main process and its process group.
	Signal int `json:"signal,omitempty"`
	// Resize gives the command's terminal another size.
	Resize *TerminalSize `json:"resize,omitempty"`
}

// FeatureTerminal must be required by a request for a terminal: an agent without
// it would run the command with pipes.
const FeatureTerminal = "terminal"

// FeatureDetach must be required by a request for a detached command: an agent
// without it would kill the command with its connection.
const FeatureDetach = "detach"

// FeatureLimits must be required by a request with Groups or Limits, which an agent
// without it would not apply.
const FeatureLimits = "limits"

// ResourceLimit is one of setrlimit(2).
type ResourceLimit struct {
	// Name is that of the resource, in lower case without RLIMIT_: nofile.
	Name string `json:"name"`
	// Soft and Hard are in the resource's unit; Unlimited: none.
	Soft int64 `json:"soft"`
	Hard int64 `json:"hard"`
}

// Unlimited is no limit.
const Unlimited = -1

// TerminalSize is the size of a terminal in characters.
type TerminalSize struct {
	Rows    uint16 `json:"rows"`
	Columns uint16 `json:"columns"`
}

// What happens to an output stream of a command.
const (
	OutputStream  = ""        // sent to the host
	OutputDiscard = "discard" // connected to /dev/null
	OutputStdout  = "stdout"  // stderr only: the same pipe as stdout, order kept
)

// ExecRequest describes a command.
type ExecRequest struct {
	// Args is the argument vector; Args[0] is looked up in the command's PATH
	// when it has no slash.
	Args []Text `json:"args"`
	// Env entries (NAME=value) are added to the default environment (PATH,
	// HOME, USER, LOGNAME), or are all of it when ClearEnv is set.
	Env      []Text `json:"env,omitempty"`
	ClearEnv bool   `json:"clear_env,omitempty"`
	// Dir is the working directory; empty: the user's home, or / without one.
	Dir Text `json:"dir,omitempty"`
	// User is "name", "uid", "name:group" or "uid:gid", numbers need no entry
	// in /etc/passwd. Empty: the user the agent runs as, root.
	User string `json:"user,omitempty"`
	// Terminal gives the command a terminal of this size, which is its stdin,
	// stdout and stderr. What it shows is the Stdout stream; Stdout and Stderr
	// below do not count. Needs FeatureTerminal.
	Terminal *TerminalSize `json:"terminal,omitempty"`
	// Stdin: the host sends the Stdin stream. Otherwise it is /dev/null.
	Stdin bool `json:"stdin,omitempty"`
	// Stdout and Stderr are one of the Output words.
	Stdout string `json:"stdout,omitempty"`
	Stderr string `json:"stderr,omitempty"`
	// StdoutLimit and StderrLimit cut a stream after so many bytes; the rest is
	// read, counted and dropped. 0: no limit.
	StdoutLimit int64 `json:"stdout_limit,omitempty"`
	StderrLimit int64 `json:"stderr_limit,omitempty"`
	// TimeoutMS ends the command and all its descendants. 0: no timeout.
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
	// Groups are supplementary groups in addition to the user's, by name or number.
	// Needs FeatureLimits.
	Groups []string `json:"groups,omitempty"`
	// Limits of the command's resources. Needs FeatureLimits.
	Limits []ResourceLimit `json:"limits,omitempty"`
	// Detach: the command belongs to no connection and is known by its operation
	// id, which it must have. Its output is kept, to a limit. A request whose id
	// is that of such a command starts nothing: it is about that command. Needs
	// FeatureDetach; no terminal. Stdin only with Follow, and from the connection
	// that started the command: when that breaks before the input's end, the
	// command is killed.
	Detach bool `json:"detach,omitempty"`
	// Follow, of a detached command: the connection is sent its streams and an
	// ExecResult, like that of any other command. Otherwise the result is a
	// CommandStatus, at once.
	Follow bool `json:"follow,omitempty"`
}

// AttachRequest is about a detached command. Its result is a CommandStatus.
type AttachRequest struct {
	ID string `json:"id"`
	// Stdout and Stderr are OutputStream or OutputDiscard.
	Stdout string `json:"stdout,omitempty"`
	Stderr string `json:"stderr,omitempty"`
	// StdoutFrom and StderrFrom are the first bytes wanted of each stream.
	StdoutFrom int64 `json:"stdout_from,omitempty"`
	StderrFrom int64 `json:"stderr_from,omitempty"`
	// Follow: until the command has ended. Otherwise what there is now.
	Follow bool `json:"follow,omitempty"`
}

// SignalRequest sends a signal to a detached command.
type SignalRequest struct {
	ID     string `json:"id"`
	Signal int    `json:"signal"`
	// All: to every process of the command, as far as its containment reaches,
	// not only to the process group of the main one.
	All bool `json:"all,omitempty"`
}

// CommandsRequest asks for the detached commands that were started after the one
// with the number After, oldest first.
type CommandsRequest struct {
	After int64 `json:"after,omitempty"`
}

// CommandsResult has a part of them. More: ask again, after the last.
type CommandsResult struct {
	Commands []CommandStatus `json:"commands"`
	More     bool            `json:"more,omitempty"`
}

// States of a detached command.
const (
	CommandRunning = "running"
	CommandEnded   = "ended"
)

// CommandStatus is a detached command.
type CommandStatus struct {
	ID string `json:"id"`
	// Number counts the commands of a guest.
	Number int64 `json:"number"`
	// Args is the beginning of the argument vector.
	Args []Text `json:"args"`
	PID  int    `json:"pid"`
	// State is one of the Command words.
	State string `json:"state"`
	// AgeMS is the time since its start, by the guest's clock since boot.
	AgeMS       int64  `json:"age_ms"`
	Containment string `json:"containment,omitempty"`
	// What it has written so far, and what of it is kept.
	Stdout StreamStatus `json:"stdout"`
	Stderr StreamStatus `json:"stderr"`
	// Result is there when it has ended.
	Result *ExecResult `json:"result,omitempty"`
}

// StreamStatus is an output stream that the guest agent keeps: its bytes from
// KeptFrom up to Bytes.
type StreamStatus struct {
	Bytes    int64 `json:"bytes"`
	KeptFrom int64 `json:"kept_from"`
}

// What reaches the descendants of a command when it is killed.
const (
	ContainmentCgroup       = "cgroup"        // every one of them
	ContainmentProcessGroup = "process_group" // those that did not leave the group
)

// Exit codes that are not the command's own, as shells and timeout(1) use them.
const (
	ExitTimeout       = 124
	ExitNotExecutable = 126
	ExitNotFound      = 127
	ExitSignalBase    = 128
)

// ExecResult is the end of a command. It says how the command ended; that the
// machine or the protocol failed is an Error frame instead.
type ExecResult struct {
	// ExitCode is the command's own, or one of the Exit numbers.
	ExitCode int `json:"exit_code"`
	// Signal is the number of the signal that ended the main process, or 0.
	Signal   int  `json:"signal,omitempty"`
	TimedOut bool `json:"timed_out"`
	// OOMKilled: the kernel killed one of the command's processes for want of
	// memory. Always false without a memory cgroup.
	OOMKilled bool `json:"oom_killed"`
	// PeakMemoryBytes is the most memory that the command and its descendants had
	// at once, file cache included. 0: not known, without a memory cgroup or
	// before Linux 5.19.
	PeakMemoryBytes int64 `json:"peak_memory_bytes,omitempty"`
	// Bytes that the command wrote and that were sent, and those dropped
	// because of a limit.
	StdoutBytes     int64 `json:"stdout_bytes"`
	StderrBytes     int64 `json:"stderr_bytes"`
	StdoutTruncated bool  `json:"stdout_truncated"`
	StderrTruncated bool  `json:"stderr_truncated"`
	StdoutDropped   int64 `json:"stdout_dropped,omitempty"`
	StderrDropped   int64 `json:"stderr_dropped,omitempty"`
	// DurationMS is the time from start to exit on the guest's monotonic clock.
	DurationMS int64 `json:"duration_ms"`
	// Containment is one of the Containment words, empty if nothing started.
	Containment string `json:"containment,omitempty"`
	// Error is set when the command could not be invoked (126, 127).
	Error *Error `json:"error,omitempty"`
}

// PutRequest describes a file that follows on the Stdin stream. It appears
// under its name only when it is complete and on disk.
type PutRequest struct {
	// Path is absolute. What is there under this name is replaced, a symbolic
	// link as well; a directory is not.
	Path Text `json:"path"`
	// Mode are the permission bits, 07777 at most.
	Mode uint32 `json:"mode"`
	// User owns the file; same form as in ExecRequest. Empty: the agent's.
	User string `json:"user,omitempty"`
}

// GetRequest asks for a regular file's contents on the Stdout stream.
type GetRequest struct {
	Path Text `json:"path"`
}

// PutTreeRequest is followed by a tar stream (PAX) on the Stdin stream, whose
// entries are made below a directory.
type PutTreeRequest struct {
	// Path is absolute. Directories that are missing are made.
	Path Text `json:"path"`
	// Owners keeps the owners, privileged mode bits and devices of the stream;
	// otherwise all of it belongs to the guest agent's user.
	Owners bool `json:"owners,omitempty"`
	// Vacate are empty directories that are made first, as OpVacate makes them. Needs
	// FeatureSurveyor, as all that follows.
	Vacate []EmptyDirectory `json:"vacate,omitempty"`
	// Replace removes first what is in the directory, but for entries whose names match
	// one of the patterns Spare (path.Match), and what else has its path.
	Replace bool     `json:"replace,omitempty"`
	Spare   []string `json:"spare,omitempty"`
	// Sum asks for the sum of the whole directory when the stream has ended.
	Sum bool `json:"sum,omitempty"`
}

// GetTreeRequest asks for what is below a directory, as a tar stream on the
// Stdout stream.
type GetTreeRequest struct {
	Path Text `json:"path"`
	// Exact refuses a link to a directory. Needs FeatureSurveyor.
	Exact bool `json:"exact,omitempty"`
}

// PathRequest names a file for stat.
type PathRequest struct {
	Path Text `json:"path"`
}

// ListRequest asks for the entries of a directory whose names come after After,
// in byte order.
type ListRequest struct {
	Path  Text `json:"path"`
	After Text `json:"after,omitempty"`
}

// ListResult has a part of a directory. More: ask again, after the last name.
type ListResult struct {
	Entries []ListEntry `json:"entries"`
	More    bool        `json:"more,omitempty"`
}

// ListEntry is one name in a directory.
type ListEntry struct {
	Name Text `json:"name"`
	FileInfo
}

// RemoveRequest takes a file or, if Recursive, a whole tree away.
type RemoveRequest struct {
	Path      Text `json:"path"`
	Recursive bool `json:"recursive,omitempty"`
}

// MoveRequest renames within a file system.
type MoveRequest struct {
	From Text `json:"from"`
	To   Text `json:"to"`
}

// ConnectRequest joins the connection with a socket on which a program in the guest
// listens: the Stdin stream goes there, the Stdout stream comes from there.
type ConnectRequest struct {
	// Network is "unix", with a path as Address, or "tcp", with IP:PORT or :PORT,
	// which is the loopback address.
	Network string `json:"network"`
	Address Text   `json:"address"`
}

// ConnectResult says how many bytes the program received and sent.
type ConnectResult struct {
	Received int64 `json:"received"`
	Sent     int64 `json:"sent"`
}

// Kinds of files.
const (
	KindFile      = "file"
	KindDirectory = "directory"
	KindLink      = "link"
	KindOther     = "other"
)

// FileInfo describes a file. Size is what the file system said before the
// transfer; FileResult says how much was transferred.
type FileInfo struct {
	Kind    string `json:"kind,omitempty"`
	Size    int64  `json:"size"`
	Mode    uint32 `json:"mode"`
	UID     uint32 `json:"uid"`
	GID     uint32 `json:"gid"`
	MtimeNS int64  `json:"mtime_ns"`
}

// FileResult ends put and get.
type FileResult struct {
	Bytes int64 `json:"bytes"`
}

// PingResult is the state of the guest agent.
type PingResult struct {
	Version    string `json:"version"`
	Generation string `json:"generation"`
	// UptimeMS is the guest's time since boot, suspension included.
	UptimeMS int64 `json:"uptime_ms"`
	// TimeNS is the guest's wall clock, Unix time.
	TimeNS int64 `json:"time_ns"`
	// Operations running now, this one not counted.
	Operations int `json:"operations"`
}

// UsageResult is what a guest uses. What its kernel does not tell is 0.
type UsageResult struct {
	UptimeMS int64 `json:"uptime_ms"`
	CPUs     int   `json:"cpus"`
	// BusyMS is the time that all processors together were not idle, since boot.
	BusyMS int64 `json:"busy_ms"`
	// Load1 is the load average of the last minute, Tasks how many threads there are.
	Load1  float64         `json:"load_1"`
	Tasks  int             `json:"tasks"`
	Memory MemoryUsage     `json:"memory"`
	Root   FileSystemUsage `json:"root"`
	Agent  AgentHealth     `json:"agent"`
}

// MemoryUsage is the guest's memory. Available is what programs could get.
type MemoryUsage struct {
	TotalBytes     int64 `json:"total_bytes"`
	AvailableBytes int64 `json:"available_bytes"`
	SwapTotalBytes int64 `json:"swap_total_bytes"`
	SwapFreeBytes  int64 `json:"swap_free_bytes"`
}

// FileSystemUsage is a file system's space. Available is what users could get.
type FileSystemUsage struct {
	TotalBytes     int64 `json:"total_bytes"`
	AvailableBytes int64 `json:"available_bytes"`
}

// AgentHealth is how the guest agent itself is.
type AgentHealth struct {
	Version       string `json:"version"`
	ResidentBytes int64  `json:"resident_bytes"`
	// Operations running now, this one not counted, and detached commands.
	Operations int `json:"operations"`
	Detached   int `json:"detached"`
	// Protected: it is spared when memory runs out.
	Protected bool `json:"protected"`
	// Containment of commands, one of the Containment words, and whether memory is
	// accounted for each.
	Containment      string `json:"containment"`
	MemoryController bool   `json:"memory_controller"`
}

// RenewRequest gives a clone an identity of its own. Absent members are left
// as they are.
type RenewRequest struct {
	// Generation is a UUID in the usual form.
	Generation string `json:"generation"`
	// Entropy is credited to the kernel and mixed in at once; at most 512 bytes.
	Entropy []byte `json:"entropy,omitempty"`
	// WallClockNS is the host's wall clock, Unix time, at the time of sending.
	WallClockNS int64 `json:"wall_clock_ns,omitempty"`
	// Hostname has at most 64 bytes.
	Hostname string `json:"hostname,omitempty"`
	// MachineID is 32 lower-case hexadecimal digits.
	MachineID string `json:"machine_id,omitempty"`
	// BootID asks for a fresh boot id, made of the renewed entropy.
	BootID bool `json:"boot_id,omitempty"`
	// Network is for a guest with a network card.
	Network *Network `json:"network,omitempty"`
}

// Network is what a guest is on its network.
type Network struct {
	// MAC is the card's address, such as 02:00:00:00:00:01.
	MAC string `json:"mac"`
	// Addresses are the interface's own, with the lengths of their prefixes: 10.0.2.15/24.
	Addresses []string `json:"addresses"`
	// Gateways are on the way to everywhere else, one of each family.
	Gateways []string `json:"gateways,omitempty"`
	// Resolvers are asked for names.
	Resolvers []string `json:"resolvers,omitempty"`
}

// Items of a renewal, the keys of RenewResult.Items.
const (
	ItemEntropy    = "entropy"
	ItemWallClock  = "wall_clock"
	ItemHostname   = "hostname"
	ItemMachineID  = "machine_id"
	ItemBootID     = "boot_id"
	ItemNetwork    = "network"
	ItemGeneration = "generation"
	// ItemHooks is there only if the guest has hooks. It comes before the generation.
	ItemHooks = "hooks"
)

// What became of an item.
const (
	RenewDone   = "done"
	RenewAbsent = "absent" // this guest has no such thing to renew
	RenewFailed = "failed"
)

// RenewResult confirms each item by itself. An item that the agent does not
// know is missing from it, so the host counts it as not confirmed.
type RenewResult struct {
	Items map[string]RenewItem `json:"items"`
	// BootID is the new one.
	BootID string `json:"boot_id,omitempty"`
	// TimeNS is the guest's wall clock afterwards, Unix time.
	TimeNS int64 `json:"time_ns"`
}

// RenewItem is the fate of one item.
type RenewItem struct {
	Status string `json:"status"`
	Detail string `json:"detail,omitempty"`
}

// Ways to end a guest.
const (
	ShutdownPowerOff = "poweroff"
	ShutdownReboot   = "reboot"
)

// ShutdownRequest starts an orderly end of the guest.
type ShutdownRequest struct {
	Action string `json:"action"`
}

// ShutdownResult says that the end has begun, and who brings it about.
type ShutdownResult struct {
	Method string `json:"method"`
}

// ScanRequest asks for all files below a directory and all processes of the guest, as
// a stream of ScanEntries in JSON, one a line, on the Stdout stream. Its result is a
// ScanResult.
type ScanRequest struct {
	Path Text `json:"path"`
}

// ScanEntry is a file or a process.
type ScanEntry struct {
	File    *ScannedFile `json:"file,omitempty"`
	Process *ProcessInfo `json:"process,omitempty"`
}

// ScannedFile is a file, wherever in the guest's file systems it is. Two states of a
// guest in which all of it is the same have the same contents in it, unless somebody
// has set the guest's clock back to hide a change.
type ScannedFile struct {
	Path Text `json:"path"`
	FileInfo
	CtimeNS int64  `json:"ctime_ns"`
	Device  uint64 `json:"device"`
	Inode   uint64 `json:"inode"`
	// Special is the number of a device node.
	Special uint64 `json:"special,omitempty"`
	// Target is what a symbolic link contains.
	Target Text `json:"target,omitempty"`
}

// ScanResult ends a scan.
type ScanResult struct {
	Files     int64 `json:"files"`
	Processes int64 `json:"processes"`
	// Unread are directories that could not be read, the first hundred.
	Unread []Text `json:"unread,omitempty"`
	// What the guest agent itself has changed in its renewal is not among the files.
	// What has changed since has a ctime that is not before RenewedNS; a process that
	// was started since, a Start above RenewedTicks. 0: there was no renewal.
	RenewedNS    int64  `json:"renewed_ns,omitempty"`
	RenewedTicks uint64 `json:"renewed_ticks,omitempty"`
}

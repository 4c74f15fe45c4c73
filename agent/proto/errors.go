package proto

// Error is a failure with a stable word for programs and a sentence for
// people. It travels as the Error frame and inside ExecResult.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	// Retryable: the same request may succeed a moment later, and nothing of
	// it has happened yet.
	Retryable bool `json:"retryable"`
}

// Error implements error.
func (e *Error) Error() string { return e.Message + " (" + e.Code + ")" }

// Is makes errors.Is match on the code alone: errors.Is(err, &Error{Code: …}).
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Stable words for Error.Code. Words are added, never changed or reused.
const (
	// The connection.
	CodeProtocol           = "protocol_error"
	CodeVersionUnsupported = "version_unsupported"
	CodeUnsupported        = "unsupported"
	CodeInvalidRequest     = "invalid_request"
	CodeInternal           = "internal"

	// The state of the guest.
	CodeGenerationMismatch = "generation_mismatch"
	CodeOperationExists    = "operation_exists"
	CodeOperationUnknown   = "operation_unknown"
	CodeTooManyOperations  = "too_many_operations"
	CodeResourceExhausted  = "resource_exhausted"
	CodeShuttingDown       = "shutting_down"

	// A command that could not be started; these come inside ExecResult.
	CodeCommandNotFound      = "command_not_found"
	CodeCommandNotExecutable = "command_not_executable"
	CodeArgumentTooLong      = "argument_too_long"
	CodeDirectoryNotFound    = "directory_not_found"
	CodeUserNotFound         = "user_not_found"

	// A detached command that was killed because its input broke off; inside
	// ExecResult.
	CodeInputCut = "input_cut"

	// Sockets.
	CodeConnectionRefused = "connection_refused"
	CodeConnectionReset   = "connection_reset"
	CodeUnreachable       = "address_unreachable"

	// Files.
	CodeFileNotFound     = "file_not_found"
	CodeNotADirectory    = "not_a_directory"
	CodeIsADirectory     = "is_a_directory"
	CodeNotEmpty         = "directory_not_empty"
	CodeOtherFileSystem  = "other_file_system"
	CodeNotARegularFile  = "not_a_regular_file"
	CodeNameTooLong      = "name_too_long"
	CodePermissionDenied = "permission_denied"
	CodeReadOnly         = "read_only_file_system"
	CodeNoSpace          = "no_space"
	CodeNotVacated       = "not_vacated" // something does not go away
	CodeIO               = "io_error"
)

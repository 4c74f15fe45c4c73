package agent

import (
	"encoding/json"
	"runtime"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/agent/tree"
)

// rehearse encodes each message once. What package json finds out about a type it keeps, and
// what is kept before a snapshot is taken is not found out again in each of its clones, where
// whatever is used for the first time is a fault in the host.
func rehearse() {
	for _, message := range []any{
		proto.Hello{}, proto.Request{}, proto.Started{}, proto.Control{}, proto.Error{},
		proto.ExecRequest{}, proto.ExecResult{}, proto.AttachRequest{}, proto.SignalRequest{}, proto.CommandsRequest{}, proto.CommandsResult{},
		proto.PutRequest{}, proto.GetRequest{}, proto.FileResult{}, proto.PutTreeRequest{}, proto.GetTreeRequest{}, tree.Stats{},
		proto.PathRequest{}, proto.FileInfo{}, proto.ListRequest{}, proto.ListResult{}, proto.RemoveRequest{}, proto.MoveRequest{},
		proto.ConnectRequest{}, proto.ConnectResult{}, proto.PingResult{}, proto.UsageResult{}, proto.RenewRequest{}, proto.RenewResult{},
		proto.ScanRequest{}, proto.ScanResult{}, proto.SurveyRequest{}, proto.SurveyResult{}, proto.QuiesceRequest{}, proto.QuiesceResult{},
		proto.VacateRequest{}, proto.VacateResult{},
	} {
		_, _ = json.Marshal(message)
	}
	// Clones would have to clear this away.
	runtime.GC()
}

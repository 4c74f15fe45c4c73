package client

import (
	"context"
	"io/fs"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// ProcessInfo is a process of a guest.
type ProcessInfo = proto.ProcessInfo

// SurveyedFile is a file of a guest as Survey sees it.
type SurveyedFile = proto.SurveyedFile

// Survey is what there was in a guest.
type Survey = proto.SurveyResult

// Survey says which processes there are, if they are wanted, and describes files,
// following links, and some with their contents (64 KiB at most). Files that are not
// there are missing in the result. Nothing that is mounted over /proc hides anything.
func (c *Client) Survey(ctx context.Context, processes bool, files, contents []string) (s Survey, err error) {
	request := proto.SurveyRequest{Processes: processes, Files: proto.Texts(files), Contents: proto.Texts(contents)}
	err = c.ask(ctx, proto.OpSurvey, proto.Request{Generation: c.cfg.Generation}, request, &s)
	return s, err
}

// Quiescence says what of a guest is to stay.
type Quiescence struct {
	// Keep are processes as Survey found them in a copy of the guest. One that has
	// been replaced, or runs another program since, is not kept.
	Keep []ProcessInfo
	// Halt says which of them are stopped instead of going on. Nil: none.
	Halt func(ProcessInfo) bool
	// Grace is how long the others have to end themselves.
	Grace time.Duration
	// Timeout bounds the rest.
	Timeout time.Duration
}

// Quieted says what Quiesce did.
type Quieted = proto.QuiesceResult

// Quiesce ends all processes of a guest except the guest agent's and those to keep.
// It has failed if there are Survivors or the result is Unsettled.
func (c *Client) Quiesce(ctx context.Context, q Quiescence) (r Quieted, err error) {
	request := proto.QuiesceRequest{
		Keep: []proto.KeptProcess{}, GraceMS: q.Grace.Milliseconds(), TimeoutMS: max(1, q.Timeout.Milliseconds()),
	}
	for _, p := range q.Keep {
		request.Keep = append(request.Keep, proto.KeptProcess{
			PID: p.PID, Start: p.Start, Program: p.Program, Inode: p.Inode, Halt: q.Halt != nil && q.Halt(p),
		})
	}
	err = c.ask(ctx, proto.OpQuiesce, proto.Request{Generation: c.cfg.Generation}, request, &r)
	return r, err
}

// Vacated says what Vacate took away besides files.
type Vacated = proto.VacateResult

// EmptyDirectory is what Vacate makes.
type EmptyDirectory struct {
	Path string
	// User owns it, in the form of Command.User; empty: root.
	User string
	Mode fs.FileMode
}

// Vacate makes empty directories in the place of whatever has their paths. Mounts,
// links in the place of parents and files that are immutable go too. After an error
// some of the directories may be there.
func (c *Client) Vacate(ctx context.Context, directories ...EmptyDirectory) (v Vacated, err error) {
	var request proto.VacateRequest
	for _, d := range directories {
		request.Directories = append(request.Directories, proto.EmptyDirectory{Path: proto.Text(d.Path), User: d.User, Mode: toUnix(d.Mode)})
	}
	err = c.ask(ctx, proto.OpVacate, proto.Request{Generation: c.cfg.Generation}, request, &v)
	return v, err
}

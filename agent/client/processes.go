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

// Look says what of a guest is surveyed.
type Look struct {
	// Processes asks for all of them; nothing that is mounted over /proc hides any.
	Processes bool
	// Files are described, Contents too with their contents (64 KiB at most). What links
	// lead to is described instead of links. Files that are not there are missing in the
	// result.
	Files, Contents []string
	// Exact are as Contents, but of a link the link.
	Exact []string
	// Searches find more Files.
	Searches []Search
	// Tree is a directory of which the sum is wanted, in the form of tree.Sum.
	Tree string
}

// Search finds the files with one of Names that are in one of Directories. A directory
// that has two of the paths is looked through once.
type Search struct{ Directories, Names []string }

func (l *Look) request() proto.SurveyRequest {
	r := proto.SurveyRequest{
		Processes: l.Processes, Files: proto.Texts(l.Files), Contents: proto.Texts(l.Contents), Exact: proto.Texts(l.Exact), Tree: proto.Text(l.Tree),
	}
	for _, s := range l.Searches {
		r.Searches = append(r.Searches, proto.SurveySearch{Directories: proto.Texts(s.Directories), Names: proto.Texts(s.Names)})
	}
	return r
}

// surveyor is required where an older guest agent would ignore what it is asked.
var surveyor = []string{proto.FeatureSurveyor}

// Survey says what there is in a guest.
func (c *Client) Survey(ctx context.Context, l Look) (s Survey, err error) {
	request := proto.Request{Generation: c.cfg.Generation}
	if l.Exact != nil || l.Searches != nil || l.Tree != "" {
		request.Requires = surveyor
	}
	err = c.ask(ctx, proto.OpSurvey, request, l.request(), &s)
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
	// Look is what is surveyed as soon as the guest is quiet, nil for nothing.
	Look *Look
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
	envelope := proto.Request{Generation: c.cfg.Generation}
	if q.Look != nil {
		look := q.Look.request()
		request.Survey, envelope.Requires = &look, surveyor
	}
	err = c.ask(ctx, proto.OpQuiesce, envelope, request, &r)
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
	request := proto.VacateRequest{Directories: emptyDirectories(directories)}
	err = c.ask(ctx, proto.OpVacate, proto.Request{Generation: c.cfg.Generation}, request, &v)
	return v, err
}

func emptyDirectories(directories []EmptyDirectory) (list []proto.EmptyDirectory) {
	for _, d := range directories {
		list = append(list, proto.EmptyDirectory{Path: proto.Text(d.Path), User: d.User, Mode: toUnix(d.Mode)})
	}
	return list
}

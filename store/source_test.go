package store_test

import (
	"context"
	"errors"
	"testing"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

func TestSources(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := testdb.Open(t, store.Config{})
	if _, registered, err := s.Caller(ctx, ""); registered || err != nil {
		t.Fatalf("before the first source: %t, %v", registered, err)
	}
	for _, id := range []string{"shop", "Shop"} { // names compare byte by byte
		if err := s.CreateSource(ctx, "test", store.Source{ID: id, Role: store.RoleSender}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.CreateSource(ctx, "test", store.Source{ID: "shop", Role: store.RoleAdmin}); !errors.Is(err, store.ErrExists) {
		t.Fatalf("a second time: %v", err)
	}
	first, info, err := s.CreateKey(ctx, "test", "shop")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err = s.CreateKey(ctx, "test", "shop"); err != nil {
		t.Fatal(err)
	}
	if _, _, err = s.CreateKey(ctx, "test", "shop"); !errors.Is(err, store.ErrKeysFull) {
		t.Fatalf("a third key: %v", err)
	}
	if _, _, err = s.CreateKey(ctx, "test", "none"); !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("a key for nobody: %v", err)
	}
	src, registered, err := s.Caller(ctx, first)
	if src.ID != "shop" || src.Admin() || !registered || err != nil {
		t.Fatalf("%+v, %t, %v", src, registered, err)
	}
	admin := store.RoleAdmin
	if err := s.UpdateSource(ctx, "test", "shop", store.SourceChange{Role: &admin}); err != nil {
		t.Fatal(err)
	}
	if src, _, _ := s.Caller(ctx, first); !src.Admin() || !src.Enabled {
		t.Fatalf("%+v", src)
	}
	if err := s.UpdateSource(ctx, "test", "none", store.SourceChange{}); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	if err := s.RevokeKey(ctx, "test", "Shop", info.ID); !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("another's key: %v", err)
	}
	for range 2 {
		if err := s.RevokeKey(ctx, "test", "", info.ID); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := s.Caller(ctx, first); !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("the revoked key: %v", err)
	}
	if _, _, err = s.CreateKey(ctx, "test", "shop"); err != nil {
		t.Fatalf("the place of the revoked key: %v", err)
	}
	entries, err := s.Audit(ctx, 1<<62, 100)
	if err != nil || len(entries) != 8 || entries[0].Action != "key.create" || entries[0].By != "test" {
		t.Fatalf("%d entries, %v: %+v", len(entries), err, entries)
	}
}

func TestTemplateStore(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := testdb.Open(t, store.Config{})
	if _, err := s.UsableTemplate(ctx, "shop", "t"); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	create := func(source string, channel msg.Channel, status store.TemplateStatus) error {
		return s.CreateTemplate(ctx, "test", &store.Template{SourceID: source, ID: "t", Channel: channel, Content: "one", Status: status})
	}
	if err := create("shop", msg.Log, store.TemplateWaiting); err != nil {
		t.Fatal(err)
	}
	if err := create("shop", msg.Log, store.TemplateNormal); !errors.Is(err, store.ErrExists) {
		t.Fatal(err)
	}
	if _, err := s.UsableTemplate(ctx, "shop", "t"); !errors.Is(err, store.ErrNotReviewed) {
		t.Fatal(err)
	}
	if err := s.ReviewTemplate(ctx, "test", "shop", "t", msg.Log, 1, true); err != nil {
		t.Fatal(err)
	}
	if err := s.ReviewTemplate(ctx, "test", "shop", "t", msg.Log, 1, false); !errors.Is(err, store.ErrNotWaiting) {
		t.Fatal(err)
	}
	if err := s.ReviewTemplate(ctx, "test", "shop", "t", msg.Log, 2, true); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	for _, channel := range []msg.Channel{msg.Email, msg.Webhook} {
		if err := create("shop", channel, store.TemplateNormal); err != nil {
			t.Fatal(err)
		}
	}
	if err := create("bank", msg.Log, store.TemplateNormal); err != nil {
		t.Fatal(err)
	}
	updated, err := s.UpdateTemplate(ctx, "test", "shop", "t", msg.Log, func(t *store.Template) error {
		t.Content = "two"
		return nil
	})
	if err != nil || updated.Version != 2 || updated.Content != "two" {
		t.Fatalf("%+v, %v", updated, err)
	}
	refused := errors.New("no")
	if _, err := s.UpdateTemplate(ctx, "test", "shop", "t", msg.Log, func(*store.Template) error { return refused }); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	if _, err := s.UpdateTemplate(ctx, "test", "shop", "none", msg.Log, func(*store.Template) error { return nil }); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	usable, err := s.UsableTemplate(ctx, "shop", "t")
	if err != nil || len(usable) != 3 || usable[msg.Log].Version != 2 {
		t.Fatalf("%+v, %v", usable, err)
	}
	old, err := s.TemplateVersion(ctx, "shop", "t", msg.Log, 1)
	if err != nil || old.Content != "one" {
		t.Fatalf("%+v, %v", old, err)
	}
	list, err := s.Templates(ctx, "", store.TemplateCursor{}, 3)
	if err != nil || len(list) != 3 || list[0].SourceID != "bank" {
		t.Fatalf("%+v, %v", list, err)
	}
	last := list[2]
	if list, err = s.Templates(ctx, "shop", store.TemplateCursor{SourceID: last.SourceID, ID: last.ID, Channel: last.Channel}, 3); err != nil || len(list) != 1 || list[0].Version != 2 {
		t.Fatalf("%+v, %v", list, err)
	}
	if err := s.DeleteTemplate(ctx, "test", "shop", "t"); err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteTemplate(ctx, "test", "shop", "t"); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	if _, err := s.UsableTemplate(ctx, "shop", "t"); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	if old, err = s.TemplateVersion(ctx, "shop", "t", msg.Log, 2); err != nil || old.Content != "two" {
		t.Fatalf("a deleted template's accepted messages: %+v, %v", old, err)
	}
}

// Of callers that make the same first version at once, one succeeds.
func TestTemplateRace(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	errs := make(chan error)
	for range 8 {
		go func() {
			errs <- s.CreateTemplate(context.Background(), "test", &store.Template{SourceID: "shop", ID: "t", Channel: msg.Log, Content: "x", Status: store.TemplateNormal})
		}()
	}
	made := 0
	for range 8 {
		err := <-errs
		if err == nil {
			made++
		} else if !errors.Is(err, store.ErrExists) {
			t.Error(err)
		}
	}
	if made != 1 {
		t.Fatalf("%d callers made it", made)
	}
}

// Tasks that are skipped at acceptance are recorded in its transaction, or not at all.
func TestSkippedAtAcceptance(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	m := message("k")
	m.Skipped = []store.SkippedTask{{Channel: msg.SMS, Reason: "no address"}, {Channel: msg.Push, Reason: "no address"}}
	got := enqueue(t, s, m)
	db := raw(t, dsn)
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_record WHERE msg_id = ? AND status = 8 AND last_error = 'no address' AND receiver = '' AND attempt = 0", got.MsgID); n != 2 {
		t.Fatalf("%d skipped tasks", n)
	}
	bad := message("bad")
	bad.Skipped = m.Skipped
	bad.Tasks[0].Receiver = string(make([]byte, 600))
	if _, err := s.Enqueue(context.Background(), bad); err == nil {
		t.Fatal("accepted")
	}
	if n := count(t, db, "SELECT COUNT(*) FROM v_task"); n != 3 {
		t.Fatalf("%d tasks: a rejected message left some", n)
	}
	all, err := s.List(context.Background(), store.Filter{Limit: 10})
	if err != nil || len(all.Messages) != 1 || len(all.Messages[0].Tasks) != 3 || all.Messages[0].Status != "dispatched" {
		t.Fatalf("%+v, %v", all, err)
	}
	skipped, err := s.Message(context.Background(), got.MsgID)
	if err != nil || skipped.Tasks[0].LastError != "no address" {
		t.Fatalf("%+v, %v", skipped, err)
	}
	if known, err := s.Known(context.Background(), m); err != nil || known != got.MsgID {
		t.Fatalf("%d, %v", known, err)
	}
}
